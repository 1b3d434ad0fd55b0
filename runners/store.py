"""Results as files that outlive the code: append-only lines of JSON, one shard for each writer.

    results/<suite>/<commit>[-dirty-<hash>]/<environment>/<host>-<pid>-<utc>.jsonl

There is no lock and no database: nobody else writes a writer's shard, and nothing is ever rewritten. A record is on
the disk before its run counts as done, so a kill at any moment costs the runs in flight and no others; folders from
several machines merge by copying.
"""

import contextlib
import gc
import math
import os
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from mixassay.errors import UserError
from mixassay.record import SETTLED, NewerSchema, RunRecord, Shared, Unreadable, parse


class Stored(NamedTuple):
    """What a suite's folder holds: one record for each key, and what a reader should be told about the files."""

    records: list[RunRecord]
    warnings: list[str]


class Store:
    """The results folder. Make one for each process that writes; reading needs no care."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._shards: dict[tuple[int, Path], Path] = {}

    def check_writable(self) -> None:
        """Raise `UserError` unless a file can be written here: before anything trains, not after."""
        probe = self.root / f".probe-{socket.gethostname()}-{os.getpid()}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            try:
                probe.write_bytes(b"x")
            finally:
                probe.unlink(missing_ok=True)
        except OSError as problem:
            raise UserError(
                f"results folder {self.root} cannot be written: {problem.strerror}; choose another folder"
            ) from problem

    def append(self, records: Iterable[RunRecord]) -> None:
        """Put records on the disk, all of them or, with a `UserError`, none of a shard's.

        When this returns they survive a crash of the process and of the machine.
        """
        batches: dict[Path, list[bytes]] = {}
        for record in records:
            batches.setdefault(self._folder(record), []).append(record.line())
        for folder, lines in batches.items():
            writer = (os.getpid(), folder)  # a forked child must not write its parent's shard
            try:
                if writer not in self._shards:
                    self._shards[writer] = _new_shard(folder)
                _append(self._shards[writer], b"".join(lines))
            except OSError as problem:
                self._shards.pop(writer, None)  # whatever its last line looks like now, nothing may follow it
                raise UserError(
                    f"cannot write results to {folder}: {problem.strerror}; "
                    f"{len(lines)} finished run(s) were not saved, everything saved before is intact"
                ) from problem

    def read(self, suite: str) -> Stored:
        """All records of a suite: see `read_shards`."""
        return read_shards(shards(self._suite(suite)))

    def _suite(self, suite: str) -> Path:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", suite):
            raise UserError(f'suite name "{suite}" cannot be a folder name; use letters, digits, ".", "_" and "-"')
        return self.root / suite

    def _folder(self, record: RunRecord) -> Path:
        code = record.code
        commit = code.commit[:12] if code.commit != "none" else f"release-{code.version}"
        dirty = f"-dirty-{(code.patch or '')[:8]}" if code.dirty else ""
        return self._suite(record.suite) / f"{commit}{dirty}" / str(record.env["id"])


def shards(folder: Path) -> list[Path]:
    """The files of records below a folder, by name. Not those in hidden folders, which others delete meanwhile."""
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(place, name) for name in files if name.endswith(".jsonl")]
    return sorted(found)


def read_shards(paths: Iterable[Path]) -> Stored:
    """The records of some files, the first settled one for each key.

    The first, so that nobody re-runs until lucky; a later one that differs is a warning about determinism. Of
    runs that only ever failed by accident, the last attempt is kept. Raises `UserError` for a newer schema.
    """
    found: list[tuple[RunRecord, Path]] = []
    warnings: list[str] = []
    shared: Shared = {}
    with _no_gc():
        for path in paths:
            records, bad = read_shard(path, shared)
            found.extend((record, path) for record in records)
            warnings.extend(bad)
        gc.freeze()  # what was read stays, and need not be looked at again
    found.sort(key=lambda item: (item[0].time.start, item[0].attempt))
    kept: dict[str, tuple[RunRecord, Path]] = {}
    differing: list[str] = []
    for item in found:
        record, path = item
        first, where = kept.setdefault(record.key, item)
        if first is record:
            continue
        if first.status not in SETTLED:
            kept[record.key] = item
        elif record.status in SETTLED and not _same(first, record):
            differing.append(
                f"cell {record.cell} seed {record.seed}: {_shown(first)} in {where}, kept; {_shown(record)} in {path}"
            )
    if differing:
        warnings.append(f"not deterministic: {len(differing)} repeat(s) of a run gave other numbers; {differing[0]}")
    return Stored([record for record, _ in kept.values()], warnings)


def read_shard(path: Path, shared: Shared | None = None) -> tuple[list[RunRecord], list[str]]:
    """The records of one file, and a warning for each line that holds none.

    A last line without its end was being written when its writer died; its run was never reported as done and is not
    worth a warning.
    """
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except OSError as problem:
        raise UserError(f"cannot read {path}: {problem.strerror}") from problem
    records: list[RunRecord] = []
    warnings: list[str] = []
    for number, line in enumerate([*lines, rest], start=1):
        if not line.strip():
            continue
        try:
            records.append(parse(line, shared))
        except NewerSchema as problem:
            raise UserError(f"{path}:{number}: written by a newer mixassay: {problem}; upgrade to read it") from None
        except Unreadable as problem:
            if number <= len(lines):
                warnings.append(f"{path}:{number}: unreadable record skipped ({problem})")
    return records, warnings


def _new_shard(folder: Path) -> Path:
    """An empty file that nobody else has; two writers of one name (hosts may share it) get two files."""
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        path = folder / f"{socket.gethostname()}-{os.getpid()}-{stamp}.jsonl"
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            continue
        _sync_folder(folder)
        return path


def _append(path: Path, data: bytes) -> None:
    """Write and sync, in one call where the system takes it whole; on failure leave the file as it was."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        size = os.fstat(fd).st_size
        try:
            while data:
                data = data[os.write(fd, data) :]
            os.fsync(fd)
        except OSError:
            os.ftruncate(fd, size)
            raise
    finally:
        os.close(fd)


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable, where folders can be synced at all."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextlib.contextmanager
def _no_gc() -> Iterator[None]:
    """Reading makes millions of objects and no garbage cycles; the collector would take two thirds of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _same(a: RunRecord, b: RunRecord) -> bool:
    """Whether a repeat repeated: every metric, to 1e-6 (in another stack a run may differ in its last bits)."""
    if a.status != b.status or a.metrics.keys() != b.metrics.keys():
        return False
    pairs = [(a.metrics[name], b.metrics[name]) for name in a.metrics]
    return all(x == y or (x is not None and y is not None and math.isclose(x, y, rel_tol=1e-6)) for x, y in pairs)


def _shown(record: RunRecord) -> str:
    numbers: Sequence[str] = [f"{k} {v:.6g}" for k, v in record.metrics.items() if v is not None]
    return ", ".join(numbers) if record.status == "ok" and numbers else record.status
