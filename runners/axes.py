"""Axes of pictures: a range, the places of values in it, and ticks with their texts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mixassay.runners.labels import binary


@dataclass(frozen=True)
class Axis:
    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        low, value, high = (math.log2(x) if self.log else x for x in (self.low, value, self.high))
        return (value - low) / (high - low)


def accuracy_axis(label: str) -> Axis:
    """All of 0 to 100, whatever is drawn in it."""
    return Axis(f"{label}, points", -4.0, 104.0, tuple((float(y), str(y)) for y in range(0, 101, 20)))


def linear_axis(label: str, low: float, high: float) -> Axis:
    """From `low` to a little above `high`, with ticks at round numbers."""
    high = high if high > low else low + 1.0
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(m * power for m in (1, 2, 5, 10) if (high - low) / (m * power) <= 5)
    first = math.ceil(low / step)
    ticks = [n * step for n in range(first, math.floor(high / step * (1 + 1e-9)) + 1)]
    margin = 0.04 * (high - low)
    return Axis(label, low - margin, high + margin, tuple((tick, f"{tick:.6g}") for tick in ticks))


def value_axis(label: str, there: Sequence[float]) -> Axis:
    """With the values themselves as ticks; logarithmic if they span a factor of eight."""
    known = sorted(set(there))
    every = -(-len(known) // 9)
    ticks = tuple((float(value), number(value)) for value in known[::every])
    low, high = float(known[0]), float(known[-1])
    if low > 0 and high >= 8 * low:
        margin = (high / low) ** 0.08
        return Axis(label, low / margin, high * margin, ticks, log=True)
    margin = 0.08 * (high - low) or 1.0
    return Axis(label, low - margin, high + margin, ticks)


def bytes_axis(label: str, there: Sequence[float]) -> Axis:
    """Logarithmic, with ticks at powers of two; linear if there is a zero."""
    if min(there) <= 0:
        return linear_axis(label, 0.0, max(there))
    low, high = math.floor(math.log2(min(there))), math.ceil(math.log2(max(there)))
    low, high = (low - 1, high + 1) if low == high else (low, high)
    every = -(-(high - low + 1) // 8)
    ticks = tuple((2.0**power, binary(2**power)) for power in range(low, high + 1, every))
    return Axis(label, 2.0 ** (low - 0.2), 2.0 ** (high + 0.2), ticks, log=True)


def number(value: float) -> str:
    """8192 is 8K, 1000 stays 1000."""
    return binary(value) if value % 512 == 0 else f"{value:g}"
