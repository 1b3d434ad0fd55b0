"""Levels: the closed form against a walk over the tree, and the slots that tokens go through."""

import torch

from mixassay.kernels.common.fenwick import level, levels, live, merge, past

T = 300


def walk(t):
    """Levels of the tokens 0 ... t: cut the lowest set bit off t until nothing is left."""
    found, end = [0] * (t + 1), t
    while end:
        size = end & -end
        found[end - size : end] = [size.bit_length()] * size
        end -= size
    return found


def test_level_is_the_walk():
    positions = torch.arange(T)
    for t in range(T):
        assert level(torch.tensor(t), positions[: t + 1], 99).tolist() == walk(t)
    big = torch.tensor(2**47 + 2**46)
    assert level(big, torch.tensor([0, 2**46, 2**47]), 99).tolist() == [48, 48, 47]


def test_buckets_are_blocks_of_a_power_of_two():
    for t in range(T):
        sizes = {l: walk(t).count(l) for l in set(walk(t))}
        assert sizes.pop(0) == 1
        assert sizes == {l: 2 ** (l - 1) for l in past(t, 99)}
        assert len(sizes) == t.bit_count()


def test_how_many_levels():
    assert [levels(n) for n in (1, 2, 3, 4, 5, 256, 257, 16384)] == [1, 2, 3, 3, 4, 9, 10, 15]
    for n in range(1, T):
        assert levels(n) == 1 + max(max(walk(t)) for t in range(n))


def test_levels_stop_at_the_last():
    assert [past(t, 3) for t in (0, 1, 4, 7, 12)] == [[], [1], [2], [1, 2], [2]]
    assert past(7, 1) == [0]


def test_live_slots_are_those_that_the_last_token_sees():
    assert live(0, 9) == []
    for T in range(1, 40):
        for L in (1, 3, 9):
            assert live(T, L) == sorted({min(l, L - 1) for l in walk(T - 1)})


def test_merges_keep_every_token_at_its_level():
    """A slot as the set of its tokens, one row of the batch at every position."""
    for L in (1, 2, 4, 9):
        slots = torch.zeros(2, 1, L, 70, 1)
        for t in range(60):
            position = torch.tensor([t, max(t - 3, 0)])
            slots = merge(slots, position)
            for row, p in enumerate(position.tolist()):
                slots[row, 0, 0, p] = 1
                expected = torch.zeros(L, 70)
                expected[[min(l, L - 1) for l in walk(p)], range(p + 1)] = 1
                assert torch.equal(slots[row, 0, :, :, 0], expected)
