"""Mixers under autocast to bfloat16 with kernels in Triton's interpreter, which multiplies bfloat16 as integers."""

import pytest
import torch

pytest.importorskip("triton")

from mixassay.kernels import use_backend
from mixassay.kernels.common.precision import cast
from mixassay.mixers import mixer

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the device here"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]


@pytest.mark.parametrize("name", ["mamba2", "gated_deltanet", "log_linear_mamba2", "dla_mamba2", "hla2"])
def test_bfloat16_in_the_interpreter_is_as_near_float32_as_torchs(name: str) -> None:
    """Which for higher-order attention is one digit."""
    torch.manual_seed(0)
    inner, x = mixer[name](32), torch.randn(1, 20, 32)

    def made(backend: str, precision: str) -> torch.Tensor:
        with use_backend(backend), cast("cpu", precision):
            y = inner(x)
        grads = torch.autograd.grad(y.float().square().sum(), list(inner.parameters()))
        return torch.cat([y.float().flatten(), *(g.float().flatten() for g in grads)])

    truth = made("torch", "fp32")
    ours, theirs = ((made(backend, "bf16") - truth).norm() / truth.norm() for backend in ("triton", "torch"))
    assert 1e-3 < theirs < 0.2
    assert ours < 3 * theirs
