"""Groups are groups, and the ones that their names say."""

from math import gcd

import pytest
import torch

from mixassay.errors import UserError
from mixassay.tasks.parts.groups import group

ORDERS = {"S3": 6, "S4": 24, "S5": 120, "A3": 3, "A4": 12, "A5": 60, "Z60": 60, "A4xZ5": 60, "Z2xZ3": 6, "S3xZ2xA3": 36}


@pytest.mark.parametrize(("name", "order"), ORDERS.items())
def test_axioms(name: str, order: int) -> None:
    times = group(name).times
    assert times.shape == (order, order)
    every = torch.arange(order)
    assert torch.equal(times[0], every), "element 0 is the identity"
    assert torch.equal(times[:, 0], every)
    assert torch.equal(times.sort(dim=0).values, every[:, None].expand_as(times)), "a b = c has one solution a"
    assert torch.equal(times.sort(dim=1).values, every.expand_as(times))
    some = torch.arange(0, order, max(1, order // 12))
    for c in some.tolist():
        assert torch.equal(times[times, c], times[:, times[:, c]]), "(a b) c = a (b c)"


def powers(name: str) -> list[int]:
    """How often each element must be multiplied to give the identity, in ascending order."""
    times = group(name).times
    found = []
    for g in range(len(times)):
        n, x = 1, g
        while x:
            n, x = n + 1, int(times[x, g])
        found.append(n)
    return sorted(found)


def commutator_subgroup(name: str) -> set[int]:
    times = group(name).times
    inverse = (times == 0).long().argmax(1)
    a = torch.arange(len(times))
    found = set(times[times[inverse[:, None], inverse], times[a[:, None], a]].flatten().tolist())
    while True:
        some = torch.tensor(sorted(found))
        more = found | set(times[some[:, None], some].flatten().tolist())
        if more == found:
            return found
        found = more


def test_they_are_the_groups_of_their_names() -> None:
    assert powers("A5") == [1] + [2] * 15 + [3] * 20 + [5] * 24
    assert powers("S3") == [1, 2, 2, 2, 3, 3]
    assert powers("S4") == [1] + [2] * 9 + [3] * 8 + [4] * 6
    assert powers("Z60") == sorted(60 // gcd(60, k) for k in range(60))
    assert powers("Z2xZ3") == powers("Z6")
    assert len(commutator_subgroup("Z60")) == 1, "commutes"
    assert len(commutator_subgroup("A4xZ5")) == 4, "solvable: that of A4, of which the commutators are the identity"
    assert len(commutator_subgroup("A5")) == 60, "perfect, so not solvable"


def test_permutations_are_multiplied_from_left_to_right() -> None:
    """In S3, lexicographic: 1 = (0 2 1) swaps the last two points, 2 = (1 0 2) the first two."""
    times = group("S3").times
    assert int(times[1, 2]) == 3, "first 1, then 2: 0 -> 0 -> 1, 1 -> 2 -> 2, 2 -> 1 -> 0, which is (1 2 0)"
    assert int(times[2, 1]) == 4
    assert group("S3").moved == (0, 2, 2, 3, 3, 2)
    assert group("A4xZ5").moved is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("D4", 'group should be like S3, A5, Z60 or A4xZ5, got "D4"'),
        ("S", 'group should be like S3, A5, Z60 or A4xZ5, got "S"'),
        ("S3x", 'group should be like S3, A5, Z60 or A4xZ5, got "S3x"'),
        ("S8", "group S8 is too large: S7, A7 and Z5040 are the largest"),
        ("S5xA5", "group S5xA5 is too large: at most 5040 elements"),
    ],
)
def test_other_names_say_why(name: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        group(name)
    assert str(error.value) == message
