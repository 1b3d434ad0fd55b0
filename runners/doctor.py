"""`mixassay doctor`: what this machine and this installation are, what is wrong with them, and how to mend it."""

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import mixassay
from mixassay import provenance
from mixassay.errors import UserError
from mixassay.runners.machine import accelerator_possible, cores
from mixassay.runners.store import Store

TORCH = (2, 10)
"""Oldest torch that is supported."""

ROOM = 2**30
"""Free bytes below which a long sweep may fill the disk."""


class Finding(NamedTuple):
    state: Literal["ok", "note", "wrong"]
    what: str
    found: str
    mend: str = ""


def examine(results: Path) -> list[Finding]:
    """Everything worth knowing before a long sweep. Imports torch, and tells when that fails."""
    return [*versions(), *torch_and_devices(), *folder(results), git(), *leftovers(results)]


def versions() -> Iterator[Finding]:
    python = sys.version.split()[0]
    supported = sys.version_info >= (3, 11)
    yield Finding(
        "ok" if supported else "wrong",
        "python",
        f"{python} ({sys.executable})",
        "" if supported else "install 3.11 or newer",
    )
    yield Finding("ok", "mixassay", f"{mixassay.__version__} ({provenance.PACKAGE})")
    for name in ("numpy", "pydantic", "PyYAML", "rich", "safetensors", "scipy", "typer"):
        try:
            yield Finding("ok", name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding("wrong", name, "not installed", f"pip install {name}")


def torch_and_devices() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as problem:  # OSError: one of its libraries cannot be loaded
        yield Finding("wrong", "torch", f"cannot be imported: {problem}", "pip install torch")
        return
    new = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= TORCH
    mend = "" if new else f"pip install 'torch>={'.'.join(map(str, TORCH))}'"
    yield Finding("ok" if new else "wrong", "torch", torch.__version__, mend)
    yield Finding("ok", "cpu", f"{provenance.environment('cpu')['cpu']}, {cores()} cores to use")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            memory = torch.cuda.get_device_properties(index).total_memory / 2**30
            yield Finding("ok", f"cuda:{index}", f"{torch.cuda.get_device_name(index)}, {memory:.0f} GiB")
        yield triton()
    elif accelerator_possible():
        yield Finding(
            "wrong",
            "cuda",
            f"there is a device, but torch {torch.__version__} cannot use it",
            "install a CUDA build of torch that fits the driver (nvidia-smi shows its version)",
        )
    else:
        yield Finding("note", "cuda", "no device: training on the CPU")


def triton() -> Finding:
    try:
        return Finding("ok", "triton", importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        return Finding("wrong", "triton", "not installed: operators run on plain torch, slower", "pip install triton")


def folder(results: Path) -> Iterator[Finding]:
    made = [path for path in (results, *results.parents) if not path.exists()]
    try:
        Store(results).check_writable()
        yield Finding("ok", "results", f"{results.absolute()} can be written")
        for path in made:
            path.rmdir()
    except UserError as problem:
        yield Finding("wrong", "results", str(problem), "mend its permissions, or choose another with --results DIR")
    place = next(path for path in [results.absolute(), *results.absolute().parents] if path.exists())
    free = shutil.disk_usage(place).free
    enough = free >= ROOM
    yield Finding(
        "ok" if enough else "wrong", "disk", f"{free / 2**30:.1f} GiB free", "" if enough else "make room on this disk"
    )


def git() -> Finding:
    code = provenance.code("")
    if code.commit == "none":
        return Finding("ok", "git", f"not a checkout: records will name release {code.version}")
    if code.dirty:
        mend = "commit before runs that are to be kept: records of changed code are marked dirty"
        return Finding("note", "git", f"{code.commit[:12]}, with uncommitted changes in the package", mend)
    return Finding("ok", "git", f"{code.commit[:12]}, clean")


def leftovers(results: Path) -> Iterator[Finding]:
    """Checkpoints of stopped sweeps: small, and of no use once their code has changed."""
    for path in sorted(results.glob("*/.checkpoints")):
        files = [Path(place, name) for place, _, names in os.walk(path) for name in names]
        size = sum(file.stat().st_size for file in files if file.is_file())
        if size > 2**20:
            mend = f"run the sweep to its end, or delete {path}"
            yield Finding("note", "checkpoints", f"{size / 2**20:.0f} MiB in {path}", mend)
