"""A step's rows, drawn while the step before it is computed.

Drawing rows is a hundred small kernels, whose launches alone take a GPU a sixth of a narrow model's step. On a stream
of their own they fill what the step leaves idle. What is drawn is the same: rows are a pure function of the step.
"""

from collections.abc import Callable

import torch

from mixassay.tasks import Rows


class Ahead:
    """`draw(step)` gives rows on `device`, in memory that it may use again the next time.

    `rows(step)` are that step's. `taken` must be called when the current stream has been told to copy them, and no
    sooner: the next step's may then be drawn over them.
    """

    def __init__(self, draw: Callable[[int], Rows], steps: int, device: str) -> None:
        self.draw, self.steps = draw, steps
        self.stream: torch.cuda.Stream | None = None
        if torch.device(device).type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.drawn: tuple[int, Rows] | None = None

    def rows(self, step: int) -> Rows:
        if self.stream is None:
            return self.draw(step)
        if self.drawn is None or self.drawn[0] != step:
            self._begin(step)
        assert self.drawn is not None
        torch.cuda.current_stream().wait_stream(self.stream)
        return self.drawn[1]

    def taken(self) -> None:
        if self.drawn is not None and self.drawn[0] + 1 < self.steps:
            self._begin(self.drawn[0] + 1)

    def forget(self) -> None:
        """What was drawn is for other models, or by graphs that are about to go."""
        if self.stream is not None:
            self.stream.synchronize()
        self.drawn = None

    def _begin(self, step: int) -> None:
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.drawn = step, self.draw(step)
