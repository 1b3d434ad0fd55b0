"""AdamW on the rows of a buffer, against torch's own, one optimiser per row."""

import math

import pytest
import torch

from mixassay.runners.optim import AdamW, paces
from mixassay.runners.schedule import schedule

BETAS = (0.9, 0.99)
WHOLE = paces([1.0], BETAS)[0]


def rows(M=3, P=7, *, clip=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    params = torch.randn(M, P, generator=g, dtype=torch.float64)
    optim = AdamW(
        lr=torch.tensor([1e-3, 1e-2, 1e-1], dtype=torch.float64)[:M],
        weight_decay=torch.tensor([0.0, 0.1, 0.5], dtype=torch.float64)[:M],
        decay_mask=torch.ones(P, dtype=torch.float64),
        betas=BETAS,
        clip=clip,
        mean=torch.zeros_like(params),
        square=torch.zeros_like(params),
    )
    return params, optim, g


@pytest.mark.parametrize("clip", [None, 0.5])
def test_each_row_is_torch_adamw(clip):
    params, optim, g = rows(clip=clip)
    twins = [torch.nn.Parameter(p.clone()) for p in params]
    torch_optims = [
        torch.optim.AdamW([p], lr=lr, weight_decay=wd, betas=BETAS)
        for p, lr, wd in zip(twins, optim.lr.tolist(), optim.weight_decay.tolist(), strict=True)
    ]
    active = torch.ones(3, dtype=torch.bool)
    shares = [schedule("cosine", step, 20, 0.2) for step in range(20)]
    for share, pace in zip(shares, paces(shares, optim.betas), strict=True):
        grads = torch.randn(3, 7, generator=g, dtype=torch.float64)
        optim.update(params, grads, pace, active)
        for row, (p, o) in enumerate(zip(twins, torch_optims, strict=True)):
            p.grad = grads[row].clone()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_([p], clip)
            o.param_groups[0]["lr"] = optim.lr[row].item() * share
            o.step()
    torch.testing.assert_close(params, torch.stack([p.detach() for p in twins]), rtol=1e-12, atol=1e-12)


def test_rows_without_decay_are_spared():
    params, optim, _ = rows()
    optim.decay_mask[3:] = 0
    before = params.clone()
    optim.update(params, torch.zeros_like(params), WHOLE, torch.ones(3, dtype=torch.bool))
    assert torch.equal(params[:, 3:], before[:, 3:])
    assert torch.allclose(params[2, :3], before[2, :3] * (1 - 0.1 * 0.5))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_broken_row_stays_and_its_neighbours_do_not_notice(bad):
    params, optim, g = rows(clip=1.0)
    clean, clean_optim, _ = rows(clip=1.0)
    active = torch.ones(3, dtype=torch.bool)
    grads = torch.randn(3, 7, generator=g, dtype=torch.float64)
    broken = grads.clone()
    broken[1, 4] = bad
    before = params.clone()
    finite = optim.update(params, broken, WHOLE, active)
    clean_optim.update(clean, grads, WHOLE, active)
    assert finite.tolist() == [True, False, True]
    assert torch.equal(params[1], before[1])
    assert torch.equal(params[[0, 2]], clean[[0, 2]])
    assert torch.isfinite(optim.mean).all()
    assert torch.isfinite(optim.square).all()


def test_inactive_rows_do_not_move():
    params, optim, g = rows()
    before = params.clone()
    optim.update(params, torch.randn(3, 7, generator=g, dtype=torch.float64), WHOLE, torch.tensor([True, False, True]))
    assert torch.equal(params[1], before[1])
    assert not torch.equal(params[0], before[0])


def test_schedules():
    assert [schedule("constant", s, 4, 0.0) for s in range(4)] == [1, 1, 1, 1]
    assert [schedule("linear", s, 4, 0.0) for s in range(4)] == [1, 0.75, 0.5, 0.25]
    assert schedule("cosine", 0, 10, 0.0) == 1
    assert schedule("cosine", 5, 10, 0.0) == pytest.approx(0.5)
    assert [schedule("cosine", s, 10, 0.4) for s in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
