"""How a check ends other than well."""

Measured = dict[str, float | int | str]
"""What a check measured, by name, in the order in which it is shown."""


class Failed(Exception):
    """The claim does not hold: what was seen, and the smallest input found for which it is (empty: for none)."""

    def __init__(self, message: str, smallest: str = "") -> None:
        super().__init__(message)
        self.smallest = smallest


class NotOffered(Exception):
    """The mixer does not have what the claim is about."""
