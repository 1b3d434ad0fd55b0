"""Gates, norms and feature maps are computed in at least float32, whatever autocast made of their inputs."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """`x` in at least float32 (no copy if it is already)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
