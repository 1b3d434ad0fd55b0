"""All checks, in order, and what came of each. `needs`: checks without which a claim says nothing.

A mixer whose forward looks ahead cannot agree with its own steps. Such lines are not judged, so that a fault is told
once, where it is.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from mixassay.errors import UserError
from mixassay.registry import suggest
from mixassay.runners.conformance import (
    after_end,
    batch,
    carried_gradients,
    causal_gradients,
    causality,
    compiled,
    determinism,
    dtypes,
    gradients,
    growth,
    initialisation,
    lengths,
    packed,
    padding,
    parameters,
    prefill,
    recall,
    recurrent,
    shape,
    stack,
    state_size,
    time_law,
)
from mixassay.runners.conformance.outcome import Failed, Measured, NotOffered
from mixassay.runners.conformance.subject import Subject

Status = Literal["pass", "fail", "not offered", "not judged"]


@dataclass(frozen=True)
class Check:
    name: str
    claim: str
    run: Callable[[Subject], Measured]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    check: Check
    status: Status
    measured: Measured
    message: str = ""
    smallest: str = ""


def check_of(module: ModuleType, *needs: str) -> Check:
    """A module's check: its name is the module's, its claim the first sentence of the module's text."""
    name = module.__name__.rpartition(".")[2]
    claim = " ".join((module.__doc__ or "").partition("\n\n")[0].split())
    return Check(name, claim, module.check, needs)


CHECKS = (
    check_of(shape),
    check_of(causality, "shape"),
    check_of(causal_gradients, "causality"),
    check_of(after_end, "shape"),
    check_of(lengths, "causality"),
    check_of(batch, "shape"),
    check_of(padding, "causality"),
    check_of(recurrent, "lengths"),
    check_of(prefill, "recurrent"),
    check_of(packed, "lengths"),
    check_of(gradients, "shape"),
    check_of(carried_gradients, "recurrent"),
    check_of(dtypes, "shape"),
    check_of(stack, "shape"),
    check_of(compiled, "shape"),
    check_of(determinism, "shape"),
    check_of(growth, "shape"),
    check_of(state_size, "shape"),
    check_of(time_law, "shape"),
    check_of(parameters, "shape"),
    check_of(initialisation),
    check_of(recall, "shape"),
)


def chosen(names: Sequence[str]) -> tuple[Check, ...]:
    """The checks of these names, all if there is none, in the table's order."""
    known = [check.name for check in CHECKS]
    for name in names:
        if name not in known:
            raise UserError(f'unknown check "{name}".{suggest(name, known)}')
    return tuple(check for check in CHECKS if not names or check.name in names)


def run(subject: Subject, checks: tuple[Check, ...] = CHECKS) -> Iterator[Result]:
    """The result of each check, as it is known."""
    bad: set[str] = set()
    for check in checks:
        lacking = [name for name in check.needs if name in bad]
        result = Result(check, "not judged", {}, f"needs {', '.join(lacking)}") if lacking else judge(subject, check)
        if result.status in ("fail", "not judged"):
            bad.add(check.name)
        yield result


def judge(subject: Subject, check: Check) -> Result:
    """One check. What it raises of itself is a failure, too: a mixer may fall over anywhere."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Result(check, "pass", check.run(subject))
    except NotOffered as reason:
        return Result(check, "not offered", {}, str(reason))
    except Failed as fault:
        return Result(check, "fail", {}, str(fault), fault.smallest)
    except Exception as problem:
        text = " ".join(str(problem).split())[:200]
        return Result(check, "fail", {}, f"raises {type(problem).__name__}: {text}")
