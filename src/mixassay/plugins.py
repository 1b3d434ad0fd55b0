"""Plug-ins: modules that register tasks and mixers.

Named under `plugins:` in a sweep file (a Python file, or a module), and imported when the sweep is; or installed, with
an entry point in the group `mixassay.mixers` or `mixassay.tasks`, `name = "package.module:Class"`, and imported when
that name is asked for.
"""

import functools
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

from mixassay.errors import UserError

KINDS = ("mixer", "task")


@functools.cache
def installed(kind: str) -> dict[str, EntryPoint]:
    """The installed plug-ins of a kind, by name. Imports none of them."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=f"mixassay.{kind}s"):
        taken = found.setdefault(entry.name, entry)
        if taken.value != entry.value:
            raise UserError(f'{kind} "{entry.name}" is installed twice: {taken.value} and {entry.value}')
    return found


def load_installed(kind: str, name: str) -> type:
    """The class of an installed plug-in. ImportError where it lacks something, as for a built-in."""
    entry = installed(kind)[name]
    try:
        found = entry.load()
    except (ImportError, UserError):
        raise
    except Exception as fault:
        raise UserError(f"plug-in {name} (installed) cannot be imported: {told(fault)}") from fault
    if not isinstance(found, type):
        raise UserError(f"plug-in {name} (installed): {entry.value} should be a class, got {found!r}")
    return found


def files(names: Iterable[str] = ()) -> list[Path]:
    """The source files of the plug-ins of these names and of the installed ones, found without importing them."""
    modules = [entry.module for kind in KINDS for entry in installed(kind).values()]
    found = [Path(name) if name.endswith(".py") else module_file(name) for name in (*modules, *names)]
    return [path for path in dict.fromkeys(found) if path is not None and path.is_file()]


def module_file(name: str) -> Path | None:
    """The file that `import name` would run last. Its packages are not imported, as `find_spec(name)` would."""
    top, *below = name.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return None
    if not below:
        return Path(spec.origin) if spec.origin else None
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, *below)
        for file in (path / "__init__.py", path.with_name(path.name + ".py")):
            if file.is_file():
                return file
    return None


def load(names: Iterable[str]) -> None:
    """Import the plug-ins of these names. A second call imports nothing anew."""
    for name in names:
        if name.endswith(".py"):
            load_file(Path(name))
        else:
            attempt(name, name)


def load_file(path: Path) -> ModuleType:
    """The module of a file: one of its own, whatever else has its name."""
    if not path.is_file():
        raise UserError(f"plug-in {path}: no such file")
    module = f"{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    if module in sys.modules:
        return sys.modules[module]
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec is not None
    sys.modules[module] = importlib.util.module_from_spec(spec)
    try:
        attempt(str(path), module, spec)
    except BaseException:
        del sys.modules[module]
        raise
    return sys.modules[module]


def attempt(name: str, module: str, spec: ModuleSpec | None = None) -> None:
    """Import a module, telling what failed in whose plug-in."""
    try:
        if spec is None or spec.loader is None:
            importlib.import_module(module)
        else:
            spec.loader.exec_module(sys.modules[module])
    except UserError as fault:
        raise UserError(f"plug-in {name}: {fault}") from fault
    except Exception as fault:
        raise UserError(f"plug-in {name} cannot be imported: {told(fault)}") from fault


def told(fault: BaseException) -> str:
    """An exception in one line, with the place that raised it."""
    machinery = (__file__, importlib.__file__)
    frames = [
        f for f in traceback.extract_tb(fault.__traceback__) if f.filename[0] != "<" and f.filename not in machinery
    ]
    where = f" ({beside(Path(frames[-1].filename))}:{frames[-1].lineno})" if frames else ""
    return f"{type(fault).__name__}: {str(fault) or 'no message'}{where}".replace("\n", " ")


def beside(path: Path) -> Path:
    """The path as seen from the working directory, if it lies below."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
