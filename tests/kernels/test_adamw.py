"""AdamW's one pass is the update of runners/optim.py: in the interpreter, or on a GPU where there is one."""

import math

import pytest
import torch
from torch import Tensor

from mixassay.runners import optim
from mixassay.runners.optim import AdamW, paces

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE, TOL = (torch.float32, 1e-6) if GPU else (torch.float64, 1e-13)


def made(clip: float | None) -> tuple[Tensor, AdamW]:
    g = torch.Generator().manual_seed(0)
    params = torch.randn(4, 1030, generator=g, dtype=torch.float64).to(DTYPE).to(DEVICE)
    vector = lambda *xs: torch.tensor(xs, dtype=DTYPE, device=DEVICE)  # noqa: E731
    return params, AdamW(
        lr=vector(1e-3, 1e-2, 1e-1, 1e-2),
        weight_decay=vector(0.0, 0.1, 0.5, 0.1),
        decay_mask=(torch.arange(1030, device=DEVICE) % 3 > 0).to(DTYPE),
        betas=(0.9, 0.99),
        clip=clip,
        mean=torch.zeros_like(params),
        square=torch.zeros_like(params),
    )


@pytest.mark.parametrize("clip", [None, 0.5])
def test_one_pass_is_the_update(clip, monkeypatch):
    """One row has stopped, and another's gradient breaks at the last step."""
    triton = pytest.importorskip("mixassay.kernels.adamw.triton")
    passes = []
    monkeypatch.setattr(triton, "update", lambda *a, original=triton.update, **k: passes.append(original(*a, **k)))
    ends = []
    for fused in (False, True):
        monkeypatch.setattr(optim, "one_pass", lambda *_: fused)  # noqa: B023
        g = torch.Generator().manual_seed(1)
        params, adamw = made(clip)
        active = torch.tensor([True, True, True, False], device=DEVICE)
        finite = active
        for step, pace in enumerate(paces([0.5] * 5, adamw.betas).to(params)):
            grads = torch.randn(4, 1030, generator=g, dtype=torch.float64).to(DTYPE).to(DEVICE)
            grads[1, 7] = math.inf if step == 4 else 0.0
            finite = adamw.update(params, grads, pace, active)
        assert finite.tolist() == [True, False, True, True]
        ends.append((params, adamw.mean, adamw.square))
    assert len(passes) == 5
    for plain, found in zip(*ends, strict=True):
        torch.testing.assert_close(found, plain, rtol=TOL, atol=TOL)
    assert torch.equal(params[3], made(None)[0][3]), "what has stopped does not move"
