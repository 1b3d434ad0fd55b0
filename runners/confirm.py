"""Fresh seeds for suspects: both sides' own code, trained anew on the configurations that it recorded.

The runs are records like others, in a suite of their own, `<suite>.confirm`: repeating the command finds them there
and trains nothing, so that nobody confirms until lucky.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from mixassay.errors import UserError
from mixassay.record import RunRecord
from mixassay.runners.diff import FRESH, Change, Diff
from mixassay.runners.refs import CONFIRMED, Found, code_of, plug_ins, python_files, surroundings, tree
from mixassay.runners.sides import Side
from mixassay.runners.store import Store


def fresh_runs(
    diff: Diff, base: Found, head: Found, results: Path
) -> Mapping[str, tuple[list[RunRecord], list[RunRecord]]]:
    """For each suspect cell the runs of base and of head on the same fresh seeds. Trains what is not stored."""
    seeds = unused([*base.records, *head.records])
    before = runs_of(base, [(change, change.base) for change in diff.suspects], seeds, results)
    after = runs_of(head, [(change, change.head) for change in diff.suspects], seeds, results)
    return {change.cell: (before[change.cell], after[change.cell]) for change in diff.suspects}


def unused(records: Iterable[RunRecord]) -> list[int]:
    """Seeds that no run was reported or tuned on: the next ones, and the same ones at every call."""
    first = 1 + max(record.seed for record in records)
    return list(range(first, first + FRESH))


def runs_of(
    found: Found, suspects: Iterable[tuple[Change, Side | None]], seeds: list[int], results: Path
) -> dict[str, list[RunRecord]]:
    if found.place is None:
        raise UserError(f"--confirm trains the code of both sides, so both must be git refs; {found.name} is a path")
    made = {}
    with tree(found.place, whole=True) as root:
        python = python_files(root, found.place)
        for change, side in suspects:
            assert side is not None, "a suspect has two sides"
            files = plug_ins(code_of(side.any), python)[0]
            plugins = [file for file in files if Path(file).is_relative_to(root)]  # others are installed
            train(sweep(side.any, seeds, plugins), root, results)
            stored = Store(results).read(side.any.suite + CONFIRMED).records
            made[change.cell] = [r for r in stored if r.seed in seeds and is_alike(r, side.any)]
    return made


def sweep(record: RunRecord, seeds: list[int], plugins: list[str]) -> str:
    """A sweep file of one cell: the recorded configuration, tuned values included."""
    head = {"version": 1, "name": record.suite + CONFIRMED, "plugins": plugins, "seeds": seeds}
    return json.dumps({**head, **record.config})


def train(text: str, root: Path, results: Path) -> None:
    """`mixassay run` as the tree at `root` has it."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        command = [sys.executable, "-P", "-m", "mixassay", "run", file.name, "--results", str(results.resolve())]
        done = subprocess.run(command, cwd=root, env=surroundings(root), stdout=sys.stderr, check=False)
    if done.returncode not in (0, 3):
        raise UserError(f"--confirm: training in {root} ended with exit code {done.returncode}; run it again to go on")


def is_alike(fresh: RunRecord, record: RunRecord) -> bool:
    """The same configuration by the same code."""
    return fresh.config == record.config and fresh.code.source == record.code.source
