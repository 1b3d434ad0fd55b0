"""Random words drawn by a kernel are those of `draws`, bit for bit: in the interpreter, or on a GPU if there is one."""

import math

import pytest
import torch

from mixassay import draws

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STREAM = 0xDEADBEEF
SEEDS = (0, 5, 2**40 + 3, -7)


@pytest.mark.parametrize(("n", "start"), [(1, 0), (7, 0), (600, 8), (33, 4)])
def test_words(n, start):
    triton = pytest.importorskip("mixassay.kernels.philox.triton")
    seed, index = torch.tensor(SEEDS), torch.tensor([0, 1, 2**33 + 5, 9])
    found = triton.words(seed.to(DEVICE), index.to(DEVICE), STREAM, n, start)
    assert torch.equal(found.cpu(), draws.bits(seed, index, STREAM, n, start))


@pytest.mark.parametrize("shape", [(1,), (7, 9, 3), (64, 33, 5)])
def test_what_is_kept(shape):
    triton = pytest.importorskip("mixassay.kernels.philox.triton")
    seed, step = torch.tensor([1, 2**35]), torch.tensor([7, 7])
    found = triton.keep(seed.to(DEVICE), step.to(DEVICE), STREAM, math.prod(shape), round(0.7 * 65536))
    assert torch.equal(found.cpu().view(2, *shape), draws.keep_mask(seed, STREAM, 7, shape, 0.3))


@pytest.mark.parametrize(("n", "m", "limit"), [(1, 1, 5), (4, 7, 4095), (64, 77, 4096), (5, 5, 6), (3, 20, 4)])
def test_distinct_ids(n, m, limit):
    """Few ids: repeats, and rows that run out."""
    choose = pytest.importorskip("mixassay.kernels.philox.choose_triton")
    words = draws.bits(3, torch.arange(17 if m < 64 else 9), STREAM, m)
    found = choose.distinct(words.to(DEVICE), n, limit)
    assert torch.equal(found.cpu(), draws.distinct(words, n, limit))
    assert m != 5 or (found < 0).any()


@pytest.mark.parametrize(("n", "S"), [(1, 1), (4, 28), (64, 64), (17, 100)])
def test_a_race(n, S):
    choose = pytest.importorskip("mixassay.kernels.philox.choose_triton")
    words = draws.bits(4, torch.arange(9), STREAM, S)
    words[0] = 0xFFFFFFFF
    handicaps = torch.linspace(1, 2**27, S, dtype=torch.float64).long()
    given = draws._quantiles(words.device), handicaps
    found = choose.race(words.to(DEVICE), *(x.to(DEVICE) for x in given), n, (1 << (S - 1).bit_length()) - 1)
    assert torch.equal(found.cpu(), draws.race(words, handicaps, n))


def test_a_seed_of_64_bits_is_one_key():
    assert draws.signed(2**64 - 7) == -7
    index = torch.arange(2)
    assert torch.equal(draws.bits(2**64 - 7, index, 1, 4), draws.bits(torch.tensor([-7, -7]), index, 1, 4))
