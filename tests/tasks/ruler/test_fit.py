"""The search for the largest haystack, against trying every size."""

import random

import pytest

from mixassay.tasks.ruler.fit import largest


@pytest.mark.parametrize("seed", range(8))
def test_it_is_the_largest_size_that_fits_for_any_rising_cost(seed: int) -> None:
    draw = random.Random(seed)
    least, most = draw.randrange(3), 3 + draw.randrange(60)
    steps = [draw.choice((0, 0, 1, 7, 200)) for _ in range(most + 1)]
    cost = [100 + sum(steps[:n]) for n in range(most + 1)]
    for limit in range(90, cost[-1] + 10):
        fitting = [n for n in range(least, most + 1) if cost[n] <= limit]
        assert largest(cost.__getitem__, limit, least, most) == (max(fitting) if fitting else None)


def test_it_fits_and_ends_for_a_cost_that_goes_up_and_down() -> None:
    draw = random.Random(0)
    for limit in range(60, 900, 7):
        cost = [50 + n + draw.randrange(40) for n in range(1000)]
        n = largest(cost.__getitem__, limit, 0, 999)
        assert n is None or (cost[n] <= limit and cost[n + 1] > limit)


def test_few_sizes_are_tried() -> None:
    """Of a straight line with bumps, as tokens are, a third of what doubling and halving need; never too many."""
    tried: list[int] = []

    def cost(n: int) -> int:
        tried.append(n)
        return 300 + 13 * n + n % 5

    n = largest(cost, 131072, 1, 10**6)
    assert len(tried) <= 9
    assert n is not None
    assert cost(n) <= 131072 < cost(n + 1)
    tried.clear()
    assert largest(lambda n: (tried.append(n), 2**n)[1], 2**500, 0, 10**6) == 500  # as crooked as it gets
    assert len(tried) < 16 * 20
