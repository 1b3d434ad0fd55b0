"""One folder per operator: `reference.py` (the definition), `chunked.py` or `parallel.py` (torch), `triton.py` and
`registered.py` (kernels, and they as torch operators), `op.py` (the public functions).

This module only decides which of an operator's implementations serves a call. Order: the call's `backend=`
argument, a surrounding `use_backend(...)`, the variable `MIXASSAY_BACKEND`, then `auto`.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TypeVar

from mixassay.errors import UserError

BACKENDS = ("auto", "reference", "torch", "triton")
F = TypeVar("F", bound=Callable[..., object])
_surrounding: ContextVar[str | None] = ContextVar("backend", default=None)
_log = logging.getLogger(__name__)


def when_traced(function: F) -> F:
    """A compiled graph does not call this function again: its result is that of the time of tracing.

    What torch.compiler.assume_constant_result does, which imports the compiler for it: a second of every process.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Every operator called inside uses this backend, unless the call names another."""
    token = _surrounding.set(_known(name, "use_backend"))
    try:
        yield
    finally:
        _surrounding.reset(token)


@when_traced
def resolve(op: str, backend: str | None, *, against_triton: str | None) -> str:
    """`reference`, `torch` or `triton` for this call.

    `against_triton` is the reason why Triton cannot serve it, or None. A backend that was asked for and cannot serve
    raises UserError with that reason; only `auto` may choose. It never chooses Triton's interpreter. In a compiled
    function the choice is made once, when it is traced.
    """
    asked = backend or _surrounding.get() or os.environ.get("MIXASSAY_BACKEND") or "auto"
    _known(asked, op)
    if asked == "triton" and against_triton:
        raise UserError(f'{op}: backend "triton" cannot serve this call: {against_triton}. Use "torch" or "auto".')
    if asked == "auto":
        asked = "torch" if against_triton or interpreted() else "triton"
        _say_once(op, asked, against_triton)
    return asked


@when_traced
def interpreted() -> bool:
    """Whether Triton kernels run in its interpreter: on a CPU, exactly as written and very slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _known(name: str, where: str) -> str:
    if name not in BACKENDS:
        raise UserError(f'{where}: unknown backend "{name}", expected one of {", ".join(BACKENDS)}')
    return name


@cache
def _say_once(op: str, chosen: str, reason: str | None) -> None:
    _log.info("%s: backend %s%s", op, chosen, f" ({reason})" if reason else "")
