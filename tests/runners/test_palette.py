"""The colours stay apart for readers who lack one of the three cones, and stand out from their ground."""

import itertools

import numpy as np
import pytest

from mixassay.runners import palette

# What dichromats see, in linear RGB: Machado, Oliveira and Fernandes 2009, severity 1.
SEEN = {
    "all cones": np.eye(3),
    "no long": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no medium": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no short": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    """sRGB without its gamma."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE 1976, whose unit is about the least difference that is seen at all."""
    x, y, z = np.cbrt(XYZ @ rgb.clip(0, 1) / [0.9505, 1, 1.089])  # the linear part near black makes no difference here
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(a: str, b: str) -> float:
    """WCAG 2: 1 for none, 21 for black on white."""
    low, high = sorted((XYZ @ linear(colour))[1] for colour in (a, b))
    return float((high + 0.05) / (low + 0.05))


@pytest.mark.parametrize("seen", SEEN.values(), ids=list(SEEN))
@pytest.mark.parametrize("colours", [palette.LIGHT, palette.DARK], ids=["light", "dark"])
def test_any_two_lines_can_be_told_apart(colours: tuple[str, ...], seen: np.ndarray) -> None:
    shown = [lab(np.array(seen) @ linear(colour)) for colour in colours]
    assert min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(shown, 2)) > 20


def test_lines_stand_out_from_their_ground_enough_for_text() -> None:
    assert min(contrast(colour, palette.PAPER) for colour in palette.LIGHT) >= 4.5
    assert min(contrast(colour, palette.NIGHT) for colour in palette.DARK) >= 4.5


def test_no_two_of_49_lines_share_colour_and_shape() -> None:
    assert len({(palette.colour(n), palette.shape(n)) for n in range(49)}) == 49


def test_shades_darken_steadily_and_their_numbers_can_be_read() -> None:
    parts = np.linspace(0, 1, 101)
    lightness = [lab(linear(palette.shade(part)))[0] for part in parts]
    assert max(np.diff(lightness)) <= 0
    assert lightness[0] - lightness[-1] > 70
    assert min(contrast(palette.shade(part), palette.ink(part)) for part in parts) >= 4.5
