"""The colours of all pictures. Seven that people with any colour vision can tell apart, on white and on black.

Colour is never the only sign: the n-th line also has the n-th shape, and from the eighth on colours come again with
other shapes. tests/runners/test_palette.py simulates colour blindness and measures how far apart they stay.
"""

LIGHT = ("#012EC3", "#C25700", "#036244", "#A84A91", "#643300", "#202020", "#0E75DF")
DARK = ("#558CFB", "#E46439", "#22C973", "#CE7FC3", "#DDCD3E", "#A2BDB0", "#A8F2FF")
PAPER, NIGHT = "#FFFFFF", "#15181C"
"""The grounds on which they are drawn."""

SHAPES = ("circle", "square", "diamond", "up", "down", "plus", "cross")


def colour(n: int) -> int:
    """The place in LIGHT and DARK of the n-th line."""
    return n % len(LIGHT)


def shape(n: int) -> str:
    """The n-th line's: no two of the first 49 share both colour and shape."""
    return SHAPES[(n + n // len(SHAPES)) % len(SHAPES)]


def shade(fraction: float) -> str:
    """One hue from pale (0) to dark (1), for heatmaps: lightness alone carries the number."""
    pale, dark = (0xEF, 0xF4, 0xFB), (0x08, 0x2A, 0x6B)
    mixed = (round(a + (b - a) * min(max(fraction, 0.0), 1.0)) for a, b in zip(pale, dark, strict=True))
    return "#" + "".join(f"{part:02X}" for part in mixed)


def ink(fraction: float) -> str:
    """What can be read on that shade."""
    return "#FFFFFF" if fraction > 0.62 else "#000000"
