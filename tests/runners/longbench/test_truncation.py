"""Long prompts lose their middle, where the model has a limit."""

import pytest

from mixassay.runners.longbench.truncation import Truncation, fit, truncation


class Letters:
    """A token for each letter, but one for "ab"."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text.replace("ab", "\0")]

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens)).replace("\0", "ab")


TEXT = "cdefghijkl"  # ten tokens


@pytest.mark.parametrize(
    ("limit", "left"), [(None, TEXT), (10, TEXT), (9, "cdefijkl"), (4, "cdkl"), (3, "cl"), (1, "")]
)
def test_the_first_and_last_half_of_the_limit_stay(limit: int | None, left: str) -> None:
    fitted = fit(TEXT, Letters(), limit)
    assert (fitted.text, fitted.whole, fitted.cut) == (left, 10, left != TEXT)
    assert fitted.tokens == Letters().encode(left)


def test_the_joined_text_is_tokenised_again() -> None:
    fitted = fit("caxxbd", Letters(), 4)
    assert fitted.text == "cabd"
    assert fitted.tokens == [ord("c"), 0, ord("d")]
    assert fitted.whole == 6


def test_what_was_cut_is_told() -> None:
    fitted = [fit(TEXT, Letters(), 4), fit("cd", Letters(), 4), fit("cdef", Letters(), 4)]
    assert truncation(fitted) == Truncation(prompts=1 / 3, tokens=6 / 16)
    assert truncation([fit(TEXT, Letters(), None)]) == Truncation(0, 0)
