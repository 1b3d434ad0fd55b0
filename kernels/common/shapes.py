"""Argument checks of the public operators: errors that name the argument, what it is and what was expected."""

from typing import NoReturn

from torch import Tensor

from mixassay.errors import UserError


class Axes:
    """The sizes of the axes seen so far in one call. The first argument that has a letter binds it."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.size: dict[str, int] = {}

    def check(self, name: str, x: Tensor, axes: str) -> None:
        """Raise UserError unless `x` is a float tensor whose axes, say "BTHK", agree with those seen before."""
        shape, size = x.shape, self.size
        if len(shape) != len(axes) or any(size.setdefault(a, n) != n for a, n in zip(axes, shape, strict=True)):
            expected = ", ".join(str(size[a]) if a in size else a for a in axes)
            self.fail(f"{name} has shape {list(shape)}, expected [{', '.join(axes)}] = [{expected}]")
        if not x.is_floating_point():
            self.fail(f"{name} has dtype {x.dtype}, expected a floating type")

    def check_groups(self, shared: str, name: str) -> None:
        """G heads of `shared` serve H heads of `name`: G must divide H."""
        G, H = self.size["G"], self.size["H"]
        if G == 0 or H % G:
            self.fail(f"{shared} has G = {G} heads, which must divide the H = {H} heads of {name}")

    def check_positive(self, name: str, n: int | None) -> None:
        if n is not None and n < 1:
            self.fail(f"{name} = {n}, expected at least 1")

    def fail(self, message: str) -> NoReturn:
        raise UserError(f"{self.op}: {message}")
