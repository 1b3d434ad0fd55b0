"""The parts alone, where a mixer's tests do not reach them."""

import pytest
import torch
from torch import nn

from mixassay.mixers.parts.decay import SelectiveDecay
from mixassay.mixers.parts.norm import RMSNorm, l2norm
from mixassay.mixers.parts.rotary import rotate
from mixassay.mixers.parts.short_conv import ShortConv


def test_rms_norm_is_torchs():
    ours, theirs = RMSNorm(24).double(), nn.RMSNorm(24, eps=1e-5).double()
    theirs.weight.data = ours.weight.data.normal_()
    x = torch.randn(3, 5, 24, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))


def test_rms_norm_by_groups():
    norm, x = RMSNorm(24, groups=3).double(), torch.randn(5, 24, dtype=torch.float64)
    norm.weight.data.normal_()
    parts = [nn.functional.rms_norm(p, (8,), eps=1e-5) for p in x.split(8, dim=-1)]
    torch.testing.assert_close(norm(x), torch.cat(parts, dim=-1) * norm.weight)


@pytest.mark.parametrize("part", [l2norm, RMSNorm(8), lambda x: SelectiveDecay(8, (1, 16))(x)[1]])
def test_low_precision_is_widened(part):
    x = (100 * torch.randn(4, 8)).bfloat16()
    assert part(x).dtype == torch.float32
    torch.manual_seed(0)
    wide = part(x.float())
    torch.manual_seed(0)
    torch.testing.assert_close(part(x), wide, rtol=0, atol=0)


def test_l2norm():
    x = torch.randn(7, 8, dtype=torch.float64)
    torch.testing.assert_close(l2norm(x).norm(dim=-1), torch.ones(7, dtype=torch.float64), rtol=0, atol=1e-5)
    zero = torch.zeros(8, requires_grad=True)
    (grad,) = torch.autograd.grad(l2norm(zero).sum(), zero)
    assert l2norm(zero).eq(0).all()
    assert grad.isfinite().all()


def test_rotation_keeps_lengths_and_sees_distances_only():
    q, k = torch.randn(2, 1, 1, 12, dtype=torch.float64)

    def score(i, j):
        return (rotate(q, torch.tensor([i]), 100.0) * rotate(k, torch.tensor([j]), 100.0)).sum()

    torch.testing.assert_close(score(9, 4), score(105, 100))
    assert not torch.isclose(score(9, 4), score(9, 5))
    torch.testing.assert_close(rotate(q, torch.tensor([77]), 100.0).norm(), q.norm())
    torch.testing.assert_close(rotate(q, torch.tensor([0]), 100.0), q)


def test_decay_is_never_above_zero_and_survives_extremes():
    decay = SelectiveDecay(4, (0, 16))
    dt, log_decay = decay(torch.tensor([-1e4, -30.0, 0.0, 1e4])[:, None].expand(-1, 4))
    assert (log_decay <= 0).all()
    assert dt.isfinite().all()
    assert log_decay.isfinite().all()


def test_a_raw_step_of_zero_gives_the_drawn_step():
    decay = SelectiveDecay(1000, (1, 16))
    dt, log_decay = decay(torch.zeros(1000))
    assert dt.min() >= 0.999e-3
    assert dt.max() <= 1.001e-1
    torch.testing.assert_close(log_decay, -decay.A_log.exp() * dt)


def test_no_convolution_is_the_activation_alone():
    x = torch.randn(2, 5, 3)
    assert torch.equal(ShortConv(3, 0)(x), x)
    assert torch.equal(ShortConv(3, 0, activation="silu")(x), nn.functional.silu(x))
    assert list(ShortConv(3, 0, bias=True).parameters()) == []
