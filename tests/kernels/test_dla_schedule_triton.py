"""The schedule's Triton kernels against its torch form: scores to rounding, all integers exactly.

Integers are compared on the kernels' own scores, which on a GPU are float32.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mixassay.kernels.dla import boundaries_triton, slots_triton
from mixassay.kernels.dla.boundaries import boundaries
from mixassay.kernels.dla.schedule import make, schedule
from mixassay.kernels.dla.slots import slots

from .test_dla_schedule import READINGS, RULES, tokens

# The interpreter turns arrays of one element into numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE, TOL = (torch.float32, 1e-4) if GPU else (torch.float64, 1e-9)


def heads(n: int, T: int, seed: int = 0, **how: Any) -> tuple[Tensor, Tensor]:
    """k [1, T, n, 6] and v [1, T, n, 5]."""
    found = [tokens(seed + head, T, **how) for head in range(n)]
    k, v = (torch.stack([head[i] for head in found], dim=1)[None].to(DEVICE, DTYPE) for i in (0, 1))
    return k, v


def check(
    k: Tensor, v: Tensor, tau: Tensor, S: int, rule: Any, g: Tensor | None = None, reading: Any = "memory"
) -> int:
    """The merges that there were."""
    score, *found = make(k, v, tau, None, g, S, reading, rule, True)
    expected, boundary = boundaries(k, v, tau, g, reading=reading, chunk_size=7)
    torch.testing.assert_close(score, expected, rtol=TOL, atol=TOL)
    close = (expected - tau[:, None]).abs()[:, 1:] <= TOL
    assert not close.any(), "no close call, so that the integers must agree"
    truth = slots(boundary, S, rule=rule, score=score, k=k, v=v)
    for name, x, y in zip(truth._fields, found, truth, strict=True):
        assert x.dtype == y.dtype, name
        assert torch.equal(x, y), name
    return int(((truth.shift >= 0) & (truth.shift < S - 1)).sum())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("S", [1, 2, 4])
def test_the_kernels_are_the_torch_form(S: int, rule: Any) -> None:
    T = 300 if GPU else 15
    k, v = heads(2, T, seed=8, length=3)  # no score within 4e-3 of its threshold
    tau = torch.tensor([[0.7, 1.0]], device=DEVICE, dtype=DTYPE)
    assert S == 1 or check(k, v, tau, S, rule) > 0, "the cache overflows, so that the rule is asked"


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("decayed", [False, True], ids=["", "decayed"])
def test_readings_and_decay(decayed: bool, reading: Any) -> None:
    for T in (1, 12):
        k, v = heads(2, T)
        g = -torch.rand(1, T, 2, generator=torch.Generator().manual_seed(T)).to(DEVICE, DTYPE)
        g[:, T // 2] = -torch.inf
        tau = torch.full((1, 2), 0.8, device=DEVICE, dtype=DTYPE)
        check(k, v, tau, 4, "density", g if decayed else None, reading)


@pytest.mark.parametrize("T", [1, 16, 70])
@pytest.mark.parametrize(("reading", "decayed"), [("memory", False), ("memory", True), ("memory_raw", False)])
def test_scores_in_chunks_are_those_of_the_torch_form(reading: str, decayed: bool, T: int) -> None:
    """Many boundaries a chunk, and none for several blocks of two chunks."""
    for length, level in ((3, 0.7), (40, 1.4)):
        k, v = heads(2, T, length=length)
        g = -0.5 * torch.rand(1, T, 2, generator=torch.Generator().manual_seed(T)).to(DEVICE, DTYPE)
        g[:, T // 2] = -torch.inf
        given = (k, v, torch.tensor([[level, level + 0.2]], device=DEVICE, dtype=DTYPE), g if decayed else None)
        expected, boundary = boundaries(*given, reading=reading)  # type: ignore[arg-type]
        for chunk in (16, 32, 64) if GPU else (16,):
            score, found = boundaries_triton.scores(*given, reading, chunk, block=2 * chunk)
            torch.testing.assert_close(score, expected, rtol=TOL, atol=TOL)
            assert torch.equal(found, boundary)


@pytest.mark.skipif(not GPU, reason="bfloat16 products need a device")
@pytest.mark.parametrize("level", [0.9, 1.9])
@pytest.mark.parametrize("decayed", [False, True], ids=["", "decayed"])
def test_low_precision_inputs_are_scored_in_float32(decayed: bool, level: float) -> None:
    """Where the open segment is another's after a close call, scores are not compared. Blocks change no bit."""
    draw = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 5000, 2, 64, generator=draw).repeat_interleave(40, 1)[:, :5000] for _ in range(2))
    k, v = ((x + 0.5 * torch.randn(x.shape, generator=draw)).to(DEVICE).bfloat16() for x in (k, v))
    tau = torch.full((2, 2), level, device=DEVICE)
    g = -0.05 * torch.rand(2, 5000, 2, generator=draw).to(DEVICE) if decayed else None
    expected, boundary = boundaries(k.double(), v.double(), tau.double(), None if g is None else g.double())
    for chunk in (0, 32, 64):
        score, found = boundaries_triton.scores(k, v, tau, g, "memory", chunk)
        same = (found != boundary).cumsum(1) == 0
        assert same.double().mean() > 0.9
        assert (score - expected)[same].abs().max() < 1e-4
        alone = boundaries_triton.scores(k, v, tau, g, "memory", chunk, block=5000)
        assert torch.equal(score, alone[0])
        assert torch.equal(found, alone[1])


@pytest.mark.parametrize("rule", RULES)
def test_equals_go_to_the_oldest_pair(rule: Any) -> None:
    k = torch.eye(8, device=DEVICE, dtype=DTYPE).repeat_interleave(3, 0)[None, :, None]
    check(k, k, torch.full((1, 1), 0.6, device=DEVICE, dtype=DTYPE), 3, rule)


@pytest.mark.parametrize("rule", RULES)
def test_forced_boundaries_and_shared_keys(rule: Any) -> None:
    k, v = heads(2, 12)
    forced = (torch.arange(12, device=DEVICE) % 3 == 2)[None, :, None].expand(1, 12, 2)
    score, *found = make(k[:, :, :1], v, None, forced, None, 4, "memory", rule, True)
    assert not score.any()
    truth = slots(forced, 4, rule=rule, k=k[:, :, :1], v=v)
    assert all(torch.equal(x, y) for x, y in zip(found, truth, strict=True))


def test_scores_are_counted_in_units_as_in_torch() -> None:
    """Halves of a unit go to the even one, scores above 16 count as 16: alone they decide between two pairs."""
    for one, other in ((2**-21, 0.0), (3 * 2**-21, 2 * 2**-20), (5 * 2**-21, 2 * 2**-20), (16.0, 17.0)):
        for order in ((one, other), (other, one)):
            score = torch.tensor([9.0, *order, 9.0, 9.0], device=DEVICE, dtype=DTYPE)[None, :, None]
            boundary = torch.ones(1, 5, 1, dtype=torch.bool, device=DEVICE)
            truth = slots(boundary, 3, rule="weak", score=score)
            found = slots_triton.fill(boundary, score, None, None, 3, "weak")
            assert all(torch.equal(x, y) for x, y in zip(found, truth, strict=True))


def test_densities_are_compared_as_integers() -> None:
    """Close in float32 and apart by a unit in the sum of 80 scores; below one unit; a first score that is a negative
    threshold, halfway between two units; all equal; none at all."""
    close = torch.full((3, 121, 1), 1.5)
    close[torch.arange(3), torch.tensor([1, 50, 119])] += 2.0**-20
    every = torch.arange(121)[None, :, None] % 40 == 0
    few = torch.randint(0, 3, (1, 40, 2), generator=torch.Generator().manual_seed(0)) * 2.0**-20
    below = few.clone()
    below[:, 0] = -2.5 * 2.0**-20
    for score, boundary, S in (
        (below, torch.ones(1, 40, 2, dtype=torch.bool), 3),
        (close, every.expand(3, 121, 1), 3),
        (few, torch.ones(1, 40, 2, dtype=torch.bool), 4),
        (few * 0 + 0.7, torch.ones(1, 40, 2, dtype=torch.bool), 33),
        (None, torch.ones(1, 8, 1, dtype=torch.bool), 4),
    ):
        score, boundary = None if score is None else score.to(DEVICE, DTYPE), boundary.to(DEVICE)
        found = slots_triton.fill(boundary, score, None, None, S, "density")
        truth = slots(boundary, S, score=score)
        assert all(torch.equal(x, y) for x, y in zip(found, truth, strict=True))


def test_it_is_a_torch_operator_that_folds_models() -> None:
    k, v = (torch.stack([x, x.flip(1)]) for x in heads(2, 7, length=2))
    tau = torch.tensor([0.7, 0.9], device=DEVICE, dtype=DTYPE)
    torch.library.opcheck(make, (k[0], v[0], tau.expand(1, 2), None, None, 3, "memory", "density", True))
    cut: Any = lambda k, v: schedule(k, v, 3, threshold=tau, backend="triton")  # noqa: E731
    both = torch.func.vmap(cut)(k, v)
    for m in range(2):
        score, found = cut(k[m], v[m])
        assert torch.equal(both[0][m], score)
        assert all(torch.equal(x[m], y) for x, y in zip(both[1], found, strict=True))


@pytest.mark.skipif(not GPU, reason="waits for a device")
def test_nothing_waits_for_the_device() -> None:
    k, v = heads(2, 300, length=3)
    tau = torch.tensor([0.7, 1.0], device=DEVICE)
    schedule(k, v, 8, threshold=tau)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, captured = schedule(k, v, 8, threshold=tau)
    graph.replay()
    assert torch.equal(captured.starts, schedule(k, v, 8, threshold=tau)[1].starts)
