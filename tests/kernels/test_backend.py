"""Who serves a call: the argument, `use_backend`, the environment, then `auto`; nothing falls back silently."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch

from mixassay.errors import UserError
from mixassay.kernels import resolve, use_backend, when_traced
from mixassay.kernels.gated_delta_rule import gated_delta_rule
from mixassay.kernels.linear_attention import linear_attention
from mixassay.kernels.softmax_attention import softmax_attention


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


def test_auto_takes_triton_where_nothing_speaks_against_it(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert resolve("op", "auto", against_triton=None) == "triton"
    assert resolve("op", "triton", against_triton=None) == "triton"


def test_auto_never_takes_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve("op", "auto", against_triton=None) == "torch"
    assert resolve("op", "triton", against_triton=None) == "triton"


@pytest.mark.parametrize("op", [linear_attention, partial(gated_delta_rule, beta=torch.ones(1, 3, 1))])
def test_triton_says_why_it_cannot_serve(monkeypatch, op):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.zeros(1, 3, 1, 4)
    with pytest.raises(UserError, match="cannot serve this call: its tensors are on cpu, not on a CUDA device"):
        op(x, x, x, backend="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    wide = torch.zeros(1, 3, 1, 300)
    with pytest.raises(UserError, match="its heads are K = 300 and V = 4 wide, more than 256"):
        op(wide, wide, x, backend="triton")


def test_triton_asked_for_where_it_cannot_serve_is_an_error(monkeypatch):
    message = 'op: backend "triton" cannot serve this call: x is on the CPU'
    with pytest.raises(UserError, match=message):
        resolve("op", "triton", against_triton="x is on the CPU")
    monkeypatch.setenv("MIXASSAY_BACKEND", "triton")
    with pytest.raises(UserError, match=message):
        resolve("op", None, against_triton="x is on the CPU")
    x = torch.zeros(1, 2, 1, 3)
    with pytest.raises(UserError, match='softmax_attention: backend "triton" cannot serve this call'):
        softmax_attention(x, x, x)


def test_an_unknown_backend_is_named(monkeypatch):
    with pytest.raises(UserError, match='op: unknown backend "cuda", expected one of auto, reference, torch, triton'):
        resolve("op", "cuda", against_triton=None)
    with pytest.raises(UserError, match='use_backend: unknown backend "cuda"'), use_backend("cuda"):
        pass
    monkeypatch.setenv("MIXASSAY_BACKEND", "tritn")
    with pytest.raises(UserError, match='unknown backend "tritn"'):
        resolve("op", None, against_triton=None)


def test_the_mark_is_torchs_own():
    def ours(): ...

    def theirs(): ...

    when_traced(ours)
    torch.compiler.assume_constant_result(theirs)
    assert vars(ours) == vars(theirs) != {}


def test_the_compiler_is_not_imported_before_it_is_needed():
    """It takes as long as all of torch."""
    code = (
        "import sys, torch, mixassay.runners.worker, mixassay.runners.eval.session\n"
        "from mixassay.mixers import mixer\n"
        "for name in mixer.names(): mixer[name]\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    subprocess.run([sys.executable, "-P", "-c", code], check=True, env=env)
