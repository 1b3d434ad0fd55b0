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
def test_bfloat16_in_the_interpreter_is_torchs(name: str) -> None:
    torch.manual_seed(0)
    inner, x = mixer[name](32), torch.randn(1, 20, 32)
    found = []
    for backend in ("torch", "triton"):
        with use_backend(backend), cast("cpu", "bf16"):
            y = inner(x)
        grads = torch.autograd.grad(y.float().square().sum(), list(inner.parameters()))
        found.append(torch.cat([y.float().flatten(), *(g.float().flatten() for g in grads)]))
    theirs, ours = found
    assert (ours - theirs).norm() < 5e-2 * theirs.norm()  # of which higher-order attention alone takes 3 %
