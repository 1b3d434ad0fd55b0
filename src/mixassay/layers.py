"""What is laid over what: a file over the one it extends, the command line over both, swept values over all."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from mixassay.errors import UserError
from mixassay.fields import shown
from mixassay.source import Node, Problems, assignment, read

NAMED = ("task", "mixer", "model.hybrid")
"""Paths at which a word is short for {name: word}."""


SHIPPED = Path(__file__).parent / "configs"


def read_extended(path: Path, found: Problems, above: tuple[Path, ...] = ()) -> Node:
    """A file's data merged over that of the file it extends: a path from its own folder, or a shipped sweep's name."""
    node = read(path, found)
    if not isinstance(node.value, dict):
        raise UserError(f"{node.at}: a sweep file is a mapping, got {shown(node.plain())}")
    base = node.value.get("extends")
    if base is None:
        return node
    below = path.parent / str(base.value)
    if not below.is_file() and (SHIPPED / f"{base.value}.yaml").is_file():
        below = SHIPPED / f"{base.value}.yaml"
    if not isinstance(base.value, str):
        raise UserError(f"{base.at}: extends should be one file or a shipped sweep's name, got {shown(base.plain())}")
    if not below.is_file():
        raise UserError(
            f"{base.at}: extends {base.value}, but there is no file {below}, nor a shipped sweep of that name"
        )
    if any(below.samefile(one) for one in (*above, path)):
        raise UserError(f"{base.at}: extends {base.value}, which extends this file in turn")
    return spell_out(read_extended(below, found, (*above, path))).merge(node)


def override(root: Node, texts: Iterable[str], found: Problems) -> Node:
    """The data with command-line values set over it."""
    for text in texts:
        path, value = assignment(text, found)
        if path == "extends":
            found.add(value.at, "has no effect: what a file extends is read before; write it into the file")
            continue
        root = spell_out(root)
        for swept in ("sweep.grid", "sweep.select.axes"):  # where one key is itself a dotted path
            if path.startswith(f"{swept}."):
                axes = root.find(swept) or Node({}, value.at, value.at)
                key = path.removeprefix(f"{swept}.")
                path, value = swept, replace(axes, value=(axes.value or {}) | {key: value})
        above = root.nearest(path.rpartition(".")[0]) if "." in path else root
        if above.value is None or isinstance(above.value, dict):
            root = root.put(path, value)
        else:
            found.add(value.at, f"nothing can be set inside {shown(above.plain())} ({above.at})")
    return root


def spell_out(tree: Node) -> Node:
    """The tree with {name: word} where it has a mere word."""
    for path in NAMED:
        node = tree.find(path)
        if node is not None and isinstance(node.value, str):
            tree = tree.put(path, replace(node, value={"name": replace(node, key=None)}))
    return tree


def place_all(tree: Node, values: Mapping[str, Node]) -> Node:
    """The tree with nodes set at paths, parents before their children."""
    for path in sorted(values, key=lambda path: path.count(".")):
        tree = spell_out(tree.put(path, values[path]))
    return tree
