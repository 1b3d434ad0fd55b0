"""Who may import whom: kernels <- mixers <- model <- runners, tasks <- runners, the spine below all.

Rows are drawn by kernels on a GPU, so `draws` stands above `kernels`; `tasks` see neither but through `draws`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BELOW_ALL = {"errors", "registry", "spec"}
MAY_IMPORT = {
    "kernels": {"errors", "kernels"},
    "mixers": {"errors", "registry", "kernels", "mixers"},
    "tasks": {"errors", "registry", "draws", "tokens", "corpus", "tasks"},
    "errors": set[str](),
    "registry": {"errors", "plugins"},
    "spec": {"errors"},
    "draws": {"errors", "kernels"},
    "tokens": {"errors"},
    "corpus": {"errors", "spec", "tokens"},
    "model": BELOW_ALL | {"draws", "kernels", "mixers", "readout"},
    "readout": {"mixers"},
    "source": {"errors"},
    "settings": {"spec"},
    "fields": BELOW_ALL | {"source"},
    "layers": BELOW_ALL | {"source", "fields"},
    "grammar": BELOW_ALL | {"source", "fields", "settings"},
    "expand": BELOW_ALL | {"source", "fields", "layers", "grammar"},
    "sweep": BELOW_ALL | {"source", "fields", "settings", "layers", "grammar", "expand"},
    "texts": BELOW_ALL | {"corpus", "source", "sweep"},
    "origins": BELOW_ALL | {"source", "fields", "sweep"},
    "plugins": {"errors"},
    "record": BELOW_ALL,
}
"""Part -> parts of the package it may import. A part that is not named here is bound only by RUNNERS_ON_TOP."""


def parts() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for folder in ("kernels", "mixers", "tasks", "runners"):
        found[folder] = sorted((ROOT / folder).rglob("*.py"))
    for path in (ROOT / "src/mixassay").glob("*.py"):
        found[path.stem] = [path]
    return found


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, part) of every import of ours, also inside functions. Relative imports count as the part they sit in."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "mixassay" else [module]
        for name in names:
            if name.split(".")[0] == "mixassay" and "." in name:
                yield getattr(node, "lineno", 0), name.split(".")[1]


def test_the_parts_are_found() -> None:
    found = parts()
    assert all(found[name] for name in ("kernels", "mixers", "tasks", "runners", "spec", "model"))
    assert list(imported(ROOT / "mixers/__init__.py")), "the walk must see imports at all"


@pytest.mark.parametrize("part", sorted(MAY_IMPORT))
def test_arrows(part: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports mixassay.{name}"
        for path in parts().get(part, [])
        for line, name in imported(path)
        if name not in MAY_IMPORT[part] and not name.startswith("__")
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_below_imports_the_runners() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for part, paths in parts().items()
        if part not in ("runners", "__main__")
        for path in paths
        for line, name in imported(path)
        if name == "runners"
    ]
    assert not wrong, "\n".join(wrong)
