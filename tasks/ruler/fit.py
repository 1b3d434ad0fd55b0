"""The largest haystack that fits: a bracket by doubling, then bisection whose cuts follow the straight line.

A prompt's tokens grow almost in proportion to its haystack, so the line through the bracket's ends nearly hits the
answer, and a cut in the middle every fourth time bounds the search by 4 log2(most) whatever the tokenizer does.
"""

from collections.abc import Callable


def largest(cost: Callable[[int], int], limit: int, least: int, most: int) -> int | None:
    """Some n in least .. most with cost(n) <= limit where n is `most` or cost(n + 1) > limit; None if least is too big.

    For a cost that never falls this is the largest n that fits. For any other it still fits.
    """
    low, at_low = least, cost(least)
    if at_low > limit:
        return None
    step = 1
    while True:
        high = min(low + step, most)
        if high == low:
            return low
        if (at_high := cost(high)) > limit:
            break
        low, at_low, step = high, at_high, 2 * step
    turn = 0
    while high - low > 1:
        line = low + (limit - at_low) * (high - low) // (at_high - at_low)
        cut = (low + high) // 2 if turn % 4 == 3 else min(max(line, low + 1), high - 1)
        if (at_cut := cost(cut)) <= limit:
            low, at_low = cut, at_cut
        else:
            high, at_high = cut, at_cut
        turn += 1
    return low
