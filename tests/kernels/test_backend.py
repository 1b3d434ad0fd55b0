"""Who serves a call: the argument, `use_backend`, the environment, then `auto`; nothing falls back silently."""

import pytest
import torch

from mixassay.errors import UserError
from mixassay.kernels import resolve, use_backend
from mixassay.kernels.causal_conv import causal_conv


def test_the_nearest_choice_wins(monkeypatch):
    choose = lambda name=None: resolve("op", name, against_triton="no kernel")  # noqa: E731
    monkeypatch.delenv("MIXASSAY_BACKEND", raising=False)
    assert choose() == "torch"
    monkeypatch.setenv("MIXASSAY_BACKEND", "reference")
    assert choose() == "reference"
    with use_backend("torch"):
        assert choose() == "torch"
        assert choose("reference") == "reference"
        with use_backend("auto"):
            assert choose() == "torch"
    assert choose() == "reference"


def test_auto_takes_triton_where_nothing_speaks_against_it():
    assert resolve("op", "auto", against_triton=None) == "triton"
    assert resolve("op", "triton", against_triton=None) == "triton"


def test_triton_asked_for_where_it_cannot_serve_is_an_error(monkeypatch):
    message = 'op: backend "triton" cannot serve this call: x is on the CPU'
    with pytest.raises(UserError, match=message):
        resolve("op", "triton", against_triton="x is on the CPU")
    monkeypatch.setenv("MIXASSAY_BACKEND", "triton")
    with pytest.raises(UserError, match=message):
        resolve("op", None, against_triton="x is on the CPU")
    with pytest.raises(UserError, match='causal_conv: backend "triton" cannot serve this call'):
        causal_conv(torch.zeros(1, 2, 3), torch.zeros(3, 2))


def test_an_unknown_backend_is_named(monkeypatch):
    with pytest.raises(UserError, match='op: unknown backend "cuda", expected one of auto, reference, torch, triton'):
        resolve("op", "cuda", against_triton=None)
    with pytest.raises(UserError, match='use_backend: unknown backend "cuda"'), use_backend("cuda"):
        pass
    monkeypatch.setenv("MIXASSAY_BACKEND", "tritn")
    with pytest.raises(UserError, match='unknown backend "tritn"'):
        resolve("op", None, against_triton=None)
