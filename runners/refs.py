"""From what is typed for BASE or HEAD to records: a git ref, a folder of results, or a file.

A git ref means the code of that commit, wherever it ran: every record whose source is what that commit's tree says it
should be. A commit that leaves a mixer alone has that mixer's records of the commit before, since `run` does not train
what is stored. The name of the commit itself counts where the tree cannot be asked.
"""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mixassay import plugins, provenance
from mixassay.errors import UserError
from mixassay.record import RunRecord
from mixassay.runners import bench_records
from mixassay.runners.bench_records import Record
from mixassay.runners.labels import find
from mixassay.runners.store import read_shards, shards

WORKING = "the working tree"
CONFIRMED = ".confirm"
"""End of the names of suites that hold the fresh runs of `--confirm`: no table or diff counts these again."""

Code = tuple[str, str, str | None]
"""Task, mixer and hybrid mixer: what decides which code a run depends on."""


@dataclass(frozen=True)
class Place:
    """Where a side's code is: a commit of the repository at `root`, or (None) the files that lie there now."""

    root: Path
    commit: str | None


@dataclass(frozen=True)
class Found:
    """A side of a diff. `place` is None for a folder or a file, whose code nobody can run."""

    name: str
    records: list[RunRecord]
    benches: list[Record]
    warnings: list[str]
    place: Place | None = None


def resolve(text: str, results: Path, *, suite: str | None = None, dirty: bool = False) -> Found:
    """The records that are meant by `text`. `dirty`: also those of trees with uncommitted changes.

    Raises `UserError` where it names nothing, or both a ref and a path.
    """
    path, place = Path(text), None if text.endswith(".jsonl") else commit_of(text)
    if path.exists():
        if place is not None:
            raise UserError(f"{text} is a git ref and a path; write its full name (refs/heads/...), or ./{text}")
        return at_path(path, suite, dirty)
    if place is None:
        raise UserError(f"{text}: no such file or folder, and no commit of a git repository here")
    return at_code(text, place, results, suite, dirty)


def working_tree(results: Path, *, suite: str | None = None) -> Found:
    """The code as it lies here, committed or not."""
    root = repository()
    if root is None:
        raise UserError("HEAD: this is no git repository; give two folders or files")
    return at_code(WORKING, Place(root, None), results, suite, dirty=True)


def at_path(path: Path, suite: str | None, dirty: bool) -> Found:
    """All that is stored there; of each cell, the newest code."""
    files = shards(path) if path.is_dir() else [path]
    records, benches, warnings = read(files)
    records = [r for r in records if is_wanted(r, suite)]
    clean = records if dirty else [r for r in records if not r.code.dirty]
    newest = {r.cell: r.code.source for r in sorted(clean, key=lambda r: r.time.start) if r.role == "report"}
    kept = [r for r in clean if r.code.source == newest.get(r.cell)]
    mixed = {r.cell for r in clean if r.cell in newest and r.code.source != newest[r.cell]}
    if mixed:
        warnings.append(f"{path} has {len(mixed)} cell(s) by more than one version of the code: the newest counts")
    warnings += left_out(len(records) - len(clean), str(path))
    return Found(str(path), kept, benches, warnings)


def at_code(name: str, place: Place, results: Path, suite: str | None, dirty: bool) -> Found:
    """What is stored under `results` and was made by the code of a place."""
    records, benches, warnings = read(sorted({*results.glob("*/*.jsonl"), *results.glob("*/*/*/*.jsonl")}))
    records = [r for r in records if is_wanted(r, suite)]
    sources, told = sources_at(place, {code_of(r) for r in records})
    warnings += [f"{name}: {text}" for text in told]
    by_source = [r for r in records if r.code.source in sources.get(code_of(r), ())]
    known = {r.cell for r in by_source}
    mine = by_source + [r for r in records if r.cell not in known and r.code.commit == place.commit]
    clean = mine if dirty else [r for r in mine if not r.code.dirty]
    warnings += left_out(len(mine) - len(clean), name)
    return Found(name, clean, [b for b in benches if is_of(b, place, dirty)], warnings, place)


def left_out(count: int, name: str) -> list[str]:
    return [f"{name}: {count} record(s) of uncommitted code left out; --allow-dirty counts them"] if count else []


def is_wanted(record: RunRecord, suite: str | None) -> bool:
    return record.suite == suite if suite is not None else not record.suite.endswith(CONFIRMED)


def is_of(bench: Record, place: Place, dirty: bool) -> bool:
    code = bench.get("code", {})
    return code.get("commit") == place.commit and (dirty or not code.get("dirty"))


def read(paths: Iterable[Path]) -> tuple[list[RunRecord], list[Record], list[str]]:
    """Runs, benchmarks, and warnings, of files that hold one or the other."""
    shards, benches, warnings = [], list[Record](), list[str]()
    for path in paths:
        first = first_line(path)
        if "bench" in first:
            found, told = bench_records.read(path)
            benches, warnings = benches + found, warnings + told
        elif "key" in first or not first:
            shards.append(path)
    stored = read_shards(shards)
    return stored.records, benches, warnings + stored.warnings


def first_line(path: Path) -> dict[str, Any]:
    """The first that is a JSON object: it shows what a file is. Files of others are none of ours."""
    try:
        with open(path, "rb") as file:
            for line in file:
                with contextlib.suppress(ValueError):
                    found = json.loads(line)
                    if isinstance(found, dict):
                        return found
    except OSError as problem:
        raise UserError(f"cannot read {path}: {problem.strerror}") from problem
    return {}


# -- the code of a commit ----------------------------------------------------------------------------------------------


def code_of(record: RunRecord) -> Code:
    hybrid = find(record.config, "model.hybrid.name")
    return str(find(record.config, "task.name")), str(find(record.config, "mixer.name")), hybrid


def sources_at(place: Place, codes: Iterable[Code]) -> tuple[dict[Code, list[str]], list[str]]:
    """What the source of each kind of run can be at a place, one hash, or several where a plug-in is there twice; and
    a warning where its package does not say."""
    asked = sorted(codes, key=str)
    with tree(place) as root:
        files = python_files(root, place)
        lines = [json.dumps({"sections": sections(code), "plugins": plug_ins(code, files)}) for code in asked]
        command = [sys.executable, "-P", str(Path(__file__).with_name("code_names.py"))]
        done = subprocess.run(
            command, input="\n".join(lines), env=surroundings(root), capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        said = done.stderr.strip().rpartition("\n")[2]
        return {}, [f"its package does not say what its code is called, so only its own commit's records count: {said}"]
    return {code: json.loads(line) for code, line in zip(asked, done.stdout.splitlines(), strict=True)}, []


def sections(code: Code) -> dict[str, Any]:
    """The least configuration that has this code."""
    task, mixer, hybrid = code
    model = {"hybrid": {"name": hybrid} if hybrid else None}
    return {"task": {"name": task}, "mixer": {"name": mixer}, "model": model, "train": {}}


def plug_ins(code: Code, files: Sequence[Path]) -> list[list[str]]:
    """Every choice of one file for each of the names that such files register."""
    task, mixer, hybrid = code
    wanted = [("task", task), ("mixer", mixer), *([("mixer", hybrid)] if hybrid else [])]
    makers = [[str(path) for path in files if registers(path, *name)] for name in wanted]
    return [list(choice) for choice in itertools.product(*filter(None, makers))]


def registers(path: Path, kind: str, name: str) -> bool:
    text = path.read_bytes()
    try:
        return f"{kind}(".encode() in text and name.encode() in text and provenance.registers(text, kind, name)
    except SyntaxError:  # whatever else lies in a repository
        return False


def python_files(root: Path, place: Place) -> list[Path]:
    """Files that may be plug-ins: those of a tree that are not the package's own, and what is installed."""
    if place.commit is not None:
        files = sorted(root.rglob("*.py"))
    else:
        listed = git(root, "ls-files", "-co", "--exclude-standard", "-z", "--", "*.py") or b""
        files = [root / os.fsdecode(name) for name in sorted(listed.split(b"\0")) if name]
    package = root / "src/mixassay"
    parts = [part.resolve() for part in (package, *package.glob("*/"))]
    outside = [path for path in files if path.is_file() and not any(path.is_relative_to(part) for part in parts)]
    return outside + plugins.files()


@contextlib.contextmanager
def tree(place: Place, *, whole: bool = False) -> Iterator[Path]:
    """The files of a place: where they lie, or a copy of the commit's Python files, or (`whole`) a worktree of it."""
    if place.commit is None:
        yield place.root
        return
    with tempfile.TemporaryDirectory(prefix="mixassay-") as folder:
        path = Path(folder).resolve() / place.commit[:12]
        if not whole:
            extract(place, path)
            yield path
            return
        if git(place.root, "worktree", "add", "--detach", str(path), place.commit) is None:
            raise UserError(f"git could not check out {place.commit[:12]} into a worktree of {place.root}")
        try:
            yield path
        finally:
            git(place.root, "worktree", "remove", "--force", str(path))


def extract(place: Place, path: Path) -> None:
    """The Python files of a commit, and the links that make the root's folders part of the package."""
    command = ["git", "-C", str(place.root), "archive", str(place.commit)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as tar,
    ):
        wanted = (m for m in tar if m.name.endswith(".py") or (m.issym() and m.name.startswith("src/mixassay/")))
        tar.extractall(path, members=wanted, filter="data")


def surroundings(root: Path) -> Mapping[str, str]:
    """The environment in which `mixassay` is the package of a tree, if it holds one, else ours."""
    own = root / "src"
    paths = [str(own)] if (own / "mixassay/__init__.py").is_file() else [path for path in sys.path if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def commit_of(text: str) -> Place | None:
    root = repository()
    found = git(root, "rev-parse", "--verify", "--quiet", f"{text}^{{commit}}") if root else None
    return Place(root, found.decode().strip()) if root and found else None


def repository() -> Path | None:
    """The one that we are in."""
    top = git(Path(), "rev-parse", "--show-toplevel")
    return Path(os.fsdecode(top.rstrip(b"\n"))) if top else None


def git(folder: Path, *words: str) -> bytes | None:
    """What git prints, or None where it fails or is not there."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
