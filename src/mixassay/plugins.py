"""Plug-ins: modules that register tasks and mixers when they are imported.

Named under `plugins:` in a sweep file (a Python file, or a module), or installed with an entry point in the group
`mixassay.plugins`.
"""

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from pathlib import Path

from mixassay.errors import UserError

GROUP = "mixassay.plugins"


def load(names: Iterable[str] = ()) -> None:
    """Import the plug-ins of these names, after all installed ones. A second call imports nothing anew."""
    for entry in entry_points(group=GROUP):
        attempt(f"{entry.name} (installed)", entry.value.partition(":")[0])
    for name in names:
        if name.endswith(".py"):
            load_file(Path(name))
        else:
            attempt(name, name)


def load_file(path: Path) -> None:
    """Import a file as a module of its own, whatever else has its name."""
    if not path.is_file():
        raise UserError(f"plug-in {path}: no such file")
    module = f"{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    if module in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec is not None
    sys.modules[module] = importlib.util.module_from_spec(spec)
    try:
        attempt(str(path), module, spec)
    except BaseException:
        del sys.modules[module]
        raise


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
