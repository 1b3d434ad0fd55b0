"""From what is typed for FILE to a path, and to a loaded sweep."""

from collections.abc import Iterator
from pathlib import Path

from mixassay.errors import UserError
from mixassay.layers import SHIPPED
from mixassay.registry import suggest
from mixassay.sweep import Sweep, conditions

AUDITS = "audit"
"""The folder of the files that are no sweeps but audits."""


def shipped(audits: bool = False) -> Iterator[tuple[str, Path]]:
    """(name, file) of the sweeps that come with the package, `mqar/table`, or of the audits, `audit/noise`."""
    for path in sorted(SHIPPED.rglob("*.yaml")):
        name = path.relative_to(SHIPPED).with_suffix("")
        if (name.parts[0] == AUDITS) == audits:
            yield name.as_posix(), path


def find(file: str, audits: bool = False) -> Path:
    """A path as given, or a shipped sweep (or audit) by its name."""
    path, names = Path(file), dict(shipped(audits))
    if path.is_file():
        return path
    if file in names:
        return names[file]
    if path.suffix in (".yaml", ".yml") or (path.parent.is_dir() and path.parent != Path()):
        raise UserError(f"{file}: no such file")
    raise UserError(f"{file}: no such file, and no shipped config of that name.{suggest(file, list(names))}")


def texts(overrides: list[str] | None, seeds: str | None) -> tuple[str, ...]:
    """All overrides, `--seeds` being one of them."""
    return (*(overrides or ()), *([f"seeds={seeds}"] if seeds is not None else []))


def load(file: str, overrides: list[str] | None, only: str | None, seeds: str | None) -> Sweep:
    sweep = Sweep.load(find(file), texts(overrides, seeds))
    return sweep.only(conditions(only)) if only is not None else sweep
