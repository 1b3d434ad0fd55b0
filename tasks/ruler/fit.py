"""The largest haystack that fits: sizes along a straight line until one is too big, then bisection with such cuts.

A prompt's tokens grow almost in proportion to its haystack, so the line through two sizes nearly hits the answer, and
long prompts are counted some five times. Doubling and halving every eighth time bounds the search by 16 log2(most)
whatever the tokenizer does.
"""

from collections.abc import Callable


def largest(cost: Callable[[int], int], limit: int, least: int, most: int) -> int | None:
    """Some n in least .. most with cost(n) <= limit where n is `most` or cost(n + 1) > limit; None if least is too big.

    For a cost that never falls this is the largest n that fits. For any other it still fits.
    """
    low, at_low = least, cost(least)
    if at_low > limit:
        return None
    step = turn = 1
    while True:
        high = min(low + step, most)
        if high == low:
            return low
        if (at_high := cost(high)) > limit:
            break
        line = (limit - at_high) * (high - low) // max(at_high - at_low, 1)
        step = (
            high - least if turn % 8 == 0 else min(16 * step, line + line // 64 + 1)
        )  # a little beyond, for a bracket
        low, at_low, turn = high, at_high, turn + 1
    while high - low > 1:
        line = low + (limit - at_low) * (high - low) // (at_high - at_low)
        cut = (low + high) // 2 if turn % 8 == 0 else min(max(line, low + 1), high - 1)
        if (at_cut := cost(cut)) <= limit:
            low, at_low = cut, at_cut
        else:
            high, at_high = cut, at_cut
        turn += 1
    return low
