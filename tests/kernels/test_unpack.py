"""Parameters of a stack, block by block in one pass, are the views of its rows: in the interpreter, or on a GPU."""

import pytest
import torch
from torch import nn

from mixassay.mixers import Mixer
from mixassay.model import Model
from mixassay.runners import stack
from mixassay.spec import ModelSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Odd(Mixer):
    """A scalar, and more than a program copies."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.gain, self.matrix = nn.Parameter(torch.randn(())), nn.Parameter(torch.randn(7, 331))

    def forward(self, x):
        return x * self.gain


def test_leaves_are_the_views_of_the_rows(monkeypatch):
    pytest.importorskip("triton")
    torch.manual_seed(0)
    members = [Model(ModelSpec(d_model=5), 13, 6, Odd).to(DEVICE) for _ in range(3)]
    made = stack.Stack(members, mode="vmap")
    monkeypatch.setattr(stack, "one_pass", lambda params: True)
    for rows in ([0, 1, 2], [2, 0], [0]):
        made.keep(rows)
        leaves, views = made.leaves(), made._views()
        assert len(leaves) == len(made.names)
        for leaf, view in zip(leaves, views, strict=True):
            assert leaf.is_contiguous()
            assert torch.equal(leaf, view)
