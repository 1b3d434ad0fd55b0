"""From what is typed for FILE to a loaded sweep."""

from collections.abc import Iterator
from pathlib import Path

from mixassay.errors import UserError
from mixassay.provenance import PACKAGE
from mixassay.registry import suggest
from mixassay.sweep import Sweep, conditions

SHIPPED = PACKAGE / "configs"


def shipped() -> Iterator[tuple[str, Path]]:
    """(name, file) of the sweep files that come with the package: `mqar/table`."""
    for path in sorted(SHIPPED.rglob("*.yaml")):
        yield path.relative_to(SHIPPED).with_suffix("").as_posix(), path


def find(file: str) -> Path:
    """A path as given, or a shipped file by its name."""
    path, names = Path(file), dict(shipped())
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
