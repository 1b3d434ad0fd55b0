"""Where a number comes from: the code and the machine. Nothing here imports torch.

The hash of a run's source covers the files it depends on and no others: its mixer, its task, the model, the trainer
and everything these import, found by reading their syntax trees. Editing one mixer then re-runs that mixer's cells
only, and a commit to the README re-runs nothing.
"""

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import mixassay
from mixassay import plugins as plug_ins
from mixassay.errors import UserError
from mixassay.record import Code
from mixassay.spec import Sections, digest

PACKAGE = Path(__file__).parent
HARNESS = {"stack": ("mixassay.model", "mixassay.runners.train"), "lm": ("mixassay.model", "mixassay.runners.lm.train")}
"""What trains a run, by its `train.loop`."""

RECORDED = ("torch", "triton", "numpy")
"""Distributions whose versions belong to the environment."""


def source_of(spec: Sections, plugins: Iterable[Path] = ()) -> str:
    """Hash of the code that a run depends on. `plugins` are the files of the sweep's plug-ins.

    A name without a file in the package comes from the plug-in that registers it, or is installed by that name; where
    none can be seen to (the name is computed, say), all plug-ins count.
    """
    wanted = [("task", spec.task.name), ("mixer", spec.mixer.name)]
    if spec.model.hybrid is not None:
        wanted.append(("mixer", spec.model.hybrid.name))
    files = tuple(plugins)
    roots: list[str | Path] = []
    for kind, name in wanted:
        module = f"mixassay.{kind}s.{name}"
        if _file(module) is not None:
            roots.append(module)
        else:
            mine = []
            for path in files:
                with parsing(path):
                    mine += [path] if registers(path.read_bytes(), kind, name) else []
            entry = plug_ins.installed(kind).get(name)
            if not mine and entry is not None and (file := plug_ins.module_file(entry.module)) is not None:
                mine = [file]
            roots.extend(mine or files)
    return source_hash([*HARNESS[spec.train.loop], *roots])


def source_hash(roots: Iterable[str | Path]) -> str:
    """Hash of the files that `roots` (module names of the package, or files of plug-ins) reach by imports, and of the
    versions of what else plug-ins import."""
    files = closure(roots)
    hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    return digest(hashes | versions(files), length=16)


def versions(files: Mapping[str, Path]) -> dict[str, str]:
    """Distribution -> version, of all that plug-ins among these modules import and the environment does not name."""
    found: dict[str, str] = {}
    for name, path in files.items():
        if not name.startswith("mixassay"):
            tops = {imported.partition(".")[0] for imported in _imports(path.read_bytes(), name, _is_package(path))}
            known = {"mixassay", name.partition(".")[0], *RECORDED} | sys.stdlib_module_names
            for top in tops - known:
                found |= {dist: str(_installed(dist)) for dist in _distributions().get(top, ())}
    return dict(sorted(found.items()))


def closure(roots: Iterable[str | Path]) -> dict[str, Path]:
    """Module name -> file, for the roots and all they import from this package, from a plug-in's own package, or from
    beside a plug-in file.

    Imports are followed wherever they stand, in functions too, and importing a module counts its parent packages.
    """
    found: dict[str, Path] = {}
    todo: list[tuple[str, Path | None]] = []
    for root in roots:
        if isinstance(root, Path):
            todo.append((_plugin_name(root), root))
        elif _file(root) is None:
            raise UserError(f"cannot hash the source of {root}: no such module in {PACKAGE}")
        else:
            todo.extend((name, None) for name in _parents(root))
    while todo:
        name, path = todo.pop()
        path = path or _file(name)
        if path is None or name in found:
            continue
        found[name] = path
        own = not name.startswith("mixassay")
        with parsing(path):
            imports = _imports(path.read_bytes(), name, _is_package(path))
        for imported in imports:
            if _file(imported) is not None:
                todo.append((imported, None))
            elif own and (other := _beside(path, name, imported)) is not None:
                todo.append((imported, other))
    return dict(sorted(found.items()))


@contextlib.contextmanager
def parsing(path: Path) -> Iterator[None]:
    """Inside, a file of a plug-in that is not Python is a user's mistake."""
    try:
        yield
    except SyntaxError as fault:
        raise UserError(f"{plug_ins.beside(path)}:{fault.lineno or 1}: SyntaxError: {fault.msg}") from None


def _is_package(path: Path) -> bool:
    return path.name == "__init__.py"


def _plugin_name(path: Path) -> str:
    """The name of a plug-in's module, that of its package in front."""
    parts, folder = [] if _is_package(path) else [path.stem], path.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts)


def _beside(path: Path, name: str, imported: str) -> Path | None:
    """The file of a module that the plug-in at `path` imports from its own package or, unless it is installed among
    others, from the folder that it lies in."""
    depth, parts = name.count(".") + _is_package(path), imported.split(".")
    folder = path.parents[depth]  # that of the top-level package or file
    installed = "site-packages" in path.parts
    places = [folder.joinpath(*parts)] if not installed or parts[0] == name.partition(".")[0] else []
    places += [] if installed else [path.parent.joinpath(*parts)]
    for place in places:
        for file in (place / "__init__.py", place.with_name(place.name + ".py")):
            if file.is_file():
                return file
    return None


def _file(module: str) -> Path | None:
    """The file of a module of the package, or None."""
    top, *parts = module.split(".")
    if top != "mixassay":
        return None
    path = PACKAGE.joinpath(*parts)
    for file in (path / "__init__.py", path.with_name(path.name + ".py")):
        if file.is_file():
            return file
    return None


@functools.cache  # on the text, not the path: a file may change under a running process
def _imports(source: bytes, module: str, package: bool) -> tuple[str, ...]:
    """Names of modules that a source text may import, each with its parents."""
    here = module.split(".") if package else module.split(".")[:-1]
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*here[: len(here) + 1 - node.level], *([node.module] if node.module else [])])
            base = base if node.level else node.module or ""
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)  # a name may be a submodule
    return tuple(sorted({parent for name in names for parent in _parents(name)}))


def _parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[: n + 1]) for n in range(len(parts)))


@functools.cache
def registers(source: bytes, kind: str, name: str) -> bool:
    """Whether a source text holds `@mixer("name")` (or `@task("name")`) on a class."""
    return any(
        isinstance(call, ast.Call)
        and kind == (call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None))
        and bool(call.args)
        and isinstance(call.args[0], ast.Constant)
        and call.args[0].value == name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        for call in node.decorator_list
    )


def code(source: str) -> Code:
    """Commit, dirty flag and patch hash of the package's own checkout, wherever the command was started."""
    commit, patch = _checkout()
    version = mixassay.__version__
    return Code(commit=commit, dirty=patch is not None, patch=patch, source=source, version=version)


@functools.cache  # one state a process: the code that runs is what was imported, not what an editor wrote since
def _checkout() -> tuple[str, str | None]:
    """(commit, hash of what differs from it or None) of the checkout that tracks this file; ("none", None) without."""
    here = str(PACKAGE.resolve())

    def git(*args: str) -> bytes | None:
        try:
            done = subprocess.run(["git", "-C", here, *args], capture_output=True, check=False)
        except OSError:  # no git on this machine
            return None
        return done.stdout if done.returncode == 0 else None

    # A wheel in a virtual environment inside somebody's repository is not part of that repository.
    if git("ls-files", "--error-unmatch", "__init__.py") is None or (head := git("rev-parse", "HEAD")) is None:
        return "none", None
    # Code only: a new results file or an edited README does not make the numbers doubtful.
    parts = [part.resolve() for part in PACKAGE.iterdir() if (part / "__init__.py").is_file()]
    paths = [here, *(str(part) for part in sorted(parts))]
    changed = git("diff", "--name-only", "--no-relative", "-z", "HEAD", "--", *paths) or b""
    added = git("ls-files", "--others", "--exclude-standard", "--full-name", "-z", "--", *paths) or b""
    root = Path(os.fsdecode((git("rev-parse", "--show-toplevel") or b"").rstrip(b"\n")))
    names = sorted({os.fsdecode(name) for name in (changed + added).split(b"\0") if name})
    if not names:
        return head.decode().strip(), None
    state = {n: hashlib.sha256((root / n).read_bytes()).hexdigest() if (root / n).is_file() else None for n in names}
    return head.decode().strip(), digest(state, length=16)


def environment(device: str, **more: str | int | bool | None) -> dict[str, str | int | bool | None]:
    """The machine a run sees. `device` is its name ("cpu", "NVIDIA H200"); `more` is what only the runner knows.

    `id` is a hash of all the rest; `class` is what must agree before numbers may be called repeats of each other.
    """
    facts: dict[str, str | int | bool | None] = {
        "class": env_class(device),
        "device": device,
        "python": platform.python_version(),
        **{name: _installed(name) for name in RECORDED},
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        **more,
    }
    return {"id": digest(facts, length=8), **facts}


def env_class(device: str) -> str:
    """Device and minor version of torch: `cpu, torch 2.13`."""
    torch = _installed("torch") or "none"
    return f"{device}, torch {'.'.join(torch.split('.')[:2])}"


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
