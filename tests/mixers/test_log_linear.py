"""The log-linear mixers: their level weights, and what makes them their parents."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mixassay.errors import UserError
from mixassay.kernels.common.fenwick import levels
from mixassay.mixers import mixer, nbytes
from mixassay.spec import task_cells
from mixassay.sweep import Sweep

D, T = 16, 40
PARENTS = {
    "log_linear_attention": ("linear_attention", {"feature_map": "identity", "normalizer": False, "output_norm": True}),
    "log_linear_mamba2": ("mamba2", {}),
    "log_linear_gated_deltanet": ("gated_deltanet", {}),
}
SIZES = {
    "log_linear_attention": {"heads": 2, "conv": 3},
    "log_linear_mamba2": {"d_state": 8, "head_dim": 8, "n_groups": 2},
    "log_linear_gated_deltanet": {"heads": 2, "expand_v": 1.5},
}
each = pytest.mark.parametrize("name", SIZES)


def build(name, seed=0, **kw) -> Any:
    torch.manual_seed(seed)
    return mixer[name](D, **SIZES.get(name, {}), **kw).double()


def tokens(seed=1):
    return torch.randn(2, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def projection(m) -> torch.Tensor:
    """The rows that make the raw level weights."""
    if hasattr(m, "level_proj"):
        return m.level_proj.weight
    return m.in_proj.weight[-m.level_scale.factor.numel() :]


class Constant(nn.Module):
    def __init__(self, value, like):
        super().__init__()
        self.value, self.shape = value, like.shape

    def forward(self, raw):
        return raw.new_full((*raw.shape[:-1], *self.shape), self.value)


@each
def test_equal_weights_are_the_parent(name):
    m = build(name, levels=4)
    parent, options = PARENTS[name]
    torch.manual_seed(0)
    other = mixer[parent](D, **SIZES[name], **options).double()
    known = dict(m.named_parameters())
    with torch.no_grad():
        for n, p in other.named_parameters():
            p.copy_(known[n][: len(p)])
    m.level_scale = Constant(m.K**-0.5 if parent == "gated_deltanet" else 1.0, m.level_scale.factor)
    torch.testing.assert_close(m(tokens()), other(tokens()), rtol=1e-10, atol=1e-10)


@each
def test_the_weights_are_softplus_of_a_projection(name):
    m = build(name, levels=7)
    nn.init.normal_(m.level_scale.factor)
    seen = []
    m.level_scale.register_forward_hook(lambda module, args, output: seen.append(output))
    m(tokens())
    raw = (tokens() @ projection(m).T).unflatten(-1, m.level_scale.factor.shape)  # head by head, level by level
    torch.testing.assert_close(seen[0], (1 + (m.level_scale.factor * raw).exp()).log())


@each
def test_at_first_a_token_without_preference_weighs_by_log_2(name):
    m = build(name)
    assert m.level_scale.factor.shape[1] == 15
    assert m.level_scale.factor.eq(1).all()
    assert m.level_scale(torch.zeros(3, m.level_scale.factor.numel())).sub(0.6931472).abs().max() < 1e-6
    assert m.level_scale.factor.no_weight_decay
    assert projection(m).std().item() == pytest.approx(0.02 if "delta" in name else 48**-0.5, rel=0.15)


@each
def test_levels_beyond_have_the_last_weight(name):
    """3 levels, 40 tokens: the same as 7 levels of which all from the third on are copies."""
    few, many = build(name, levels=3), build(name, levels=7)
    heads = few.level_scale.factor.shape[0]
    index = torch.tensor([0, 1, 2, 2, 2, 2, 2])
    known = dict(few.named_parameters())
    with torch.no_grad():
        for n, p in many.named_parameters():
            if n == "level_scale.factor":
                p.copy_(known[n][:, index])
            elif p.shape == known[n].shape:
                p.copy_(known[n])
            else:
                rows = projection(few).unflatten(0, (heads, 3))[:, index].flatten(0, 1)
                p.copy_(torch.cat([known[n][: len(known[n]) - 3 * heads], rows]))
    torch.testing.assert_close(many(tokens()), few(tokens()), rtol=1e-10, atol=1e-10)


def test_live_state_bytes_by_hand():
    m = build("log_linear_attention", levels=5).float()
    slot = 4 * 2 * 8 * 8
    rest = nbytes(m.init_state(1)) - 5 * slot
    assert rest == 8 + 4 * 2 * 3 * D  # the position, and two tokens of q, k and v
    # The last token is 0, 1, 2, 3, 4, 7, 8, 15, 16 (above level 4, so in its slot), 24 (bits 3 and 4: one slot).
    live = {0: 0, 1: 1, 2: 2, 3: 2, 4: 3, 5: 2, 8: 4, 9: 2, 16: 5, 17: 2, 25: 2}
    assert {n: (m.live_state_bytes(n) - rest) / slot for n in live} == live
    assert {m.state_bytes(n) for n in live} == {rest + 5 * slot}


@each
def test_errors(name):
    with pytest.raises(UserError, match="levels must be at least 1, got 0"):
        build(name, levels=0)


CONFIGS = sorted(p for p in (Path(__file__).parents[2] / "configs").rglob("*.yaml") if "levels: " in p.read_text())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: "/".join(path.parts[-2:]))
def test_shipped_sweeps_have_the_levels_that_they_train(path: Path) -> None:
    """With more, rows longer than those of the training would be read by weights that nothing has trained."""
    cells = [cell.sections for cell in Sweep.load(path).cells() if "levels" in cell.sections.mixer.args]
    assert cells
    for task, has in ((cell.task, cell.mixer.args["levels"]) for cell in cells):
        assert has == max(levels(args["seq_len"]) for args, _, _ in task_cells(task, "train"))
