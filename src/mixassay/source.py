"""A YAML file as data that remembers where each value was written.

Scalars follow the YAML 1.2 core schema, as editors do: `1e-4` is a number, `no` a word, `012` twelve, `2:30` a word
(PyYAML's own rules are those of YAML 1.1). Underscores may group the digits of whole numbers: `100_000`. A key given
twice is an error, and so are NaN and infinities.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from mixassay.errors import UserError


@dataclass(frozen=True, order=True)
class Place:
    """Line and column, from 1, of something in a file. `line` is 0 for what was not written in a file."""

    file: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


@dataclass(frozen=True)
class Node:
    """A value (scalar, list of nodes, or nodes by key), where it was written, and where its key was, if it has one."""

    value: Any
    at: Place
    key: Place | None = None

    def plain(self) -> Any:
        """The value as ordinary data."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        return [node.plain() for node in self.value] if isinstance(self.value, list) else self.value

    def child(self, part: str | int) -> "Node | None":
        if isinstance(self.value, dict):
            return self.value.get(part)
        if isinstance(self.value, list) and str(part).isdecimal() and int(part) < len(self.value):
            item = self.value[int(part)]
            assert isinstance(item, Node)
            return item
        return None

    def find(self, path: str) -> "Node | None":
        """What is at a dotted path ("train.stop.above", "task.train_cells.0"), if anything."""
        node: Node | None = self
        for part in path.split("."):
            node = node.child(part) if node is not None else None
        return node

    def nearest(self, path: str) -> "Node":
        """What is at a dotted path, or else the innermost of its parents that is there."""
        node = self
        for part in path.split("."):
            below = node.child(part)
            if below is None:
                break
            node = below
        return node

    def put(self, path: str, new: "Node") -> "Node":
        """A copy with another node at a dotted path. Missing mappings on the way are made."""
        part, _, rest = path.partition(".")
        inside = self.value if isinstance(self.value, dict) else {}
        if rest:
            new = inside.get(part, Node({}, new.at, new.key)).put(rest, new)
        return replace(self, value=inside | {part: new})

    def merge(self, over: "Node") -> "Node":
        """A copy with the mappings of `over` merged in, at all depths; everything else that it has replaces."""
        if not (isinstance(self.value, dict) and isinstance(over.value, dict)):
            return over
        merged = {k: self.value[k].merge(v) if k in self.value else v for k, v in over.value.items()}
        return replace(over, value=self.value | merged)

    def leaves(self, prefix: str = "") -> Iterator[tuple[str, "Node"]]:
        """(dotted path, node) of everything that is not a mapping with keys."""
        if not (isinstance(self.value, dict) and self.value):
            yield prefix, self
            return
        for key, node in self.value.items():
            yield from node.leaves(f"{prefix}.{key}" if prefix else key)


@dataclass
class Problems:
    """Everything found wrong so far, to be told all at once."""

    found: dict[tuple[Place, str], None] = field(default_factory=dict)

    def add(self, at: Place, message: str) -> None:
        self.found[at, message] = None

    def raise_any(self) -> None:
        """Raise one `UserError` with a line for each problem, in the order of the file."""
        if self.found:
            raise UserError("\n".join(f"{at}: {message}" for at, message in sorted(self.found)))

    def __bool__(self) -> bool:
        return bool(self.found)


def read(path: Path | str, problems: Problems) -> Node:
    """The data of a file. Raises `UserError` when it cannot be read at all; adds lesser faults to `problems`."""
    file = str(path)
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise UserError(f"{place(file, fault.object[: fault.start].decode())}: not UTF-8 text") from None
    except OSError as fault:
        raise UserError(f"{file}: {fault.strerror or fault}") from None
    return parse(text, file, problems)


def parse(text: str, file: str, problems: Problems) -> Node:
    """The data in a text that `file` names."""
    try:
        loader = Loader(text)
        root = loader.get_single_node()
    except yaml.reader.ReaderError as fault:
        raise UserError(f"{place(file, text[: fault.position])}: character that YAML forbids: {fault.reason}") from None
    except yaml.MarkedYAMLError as fault:
        mark = fault.problem_mark or fault.context_mark
        at = Place(file, mark.line + 1, mark.column + 1) if mark else Place(file)
        said = "; ".join(part for part in (fault.problem, fault.context, fault.note) if part)
        raise UserError(f"{at}: not YAML: {said}") from None
    if root is None:
        return Node(None, Place(file, 1, 1))
    return Reader(file, problems).node(root, ())


def place(file: str, before: str) -> Place:
    """The place after the text `before`."""
    lines = before.split("\n")
    return Place(file, len(lines), len(lines[-1]) + 1)


class Loader(yaml.SafeLoader):
    """PyYAML's parser with the scalars of YAML 1.2."""


TAG = "tag:yaml.org,2002:"
INT = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(?:(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)")
BOOL = re.compile("true|True|TRUE|false|False|FALSE")
NULL = re.compile("null|Null|NULL|~|")

Loader.yaml_implicit_resolvers = {}
for tag, regexp, first in (
    ("null", NULL, ["~", "n", "N", ""]),
    ("bool", BOOL, list("tTfF")),
    ("int", INT, list("-+0123456789")),
    ("float", FLOAT, list("-+.0123456789")),
):
    Loader.add_implicit_resolver(TAG + tag, re.compile(f"(?:{regexp.pattern})$"), first)


@dataclass(frozen=True)
class Reader:
    """PyYAML's nodes to ours."""

    file: str
    problems: Problems

    def place(self, node: yaml.Node) -> Place:
        return Place(self.file, node.start_mark.line + 1, node.start_mark.column + 1)

    def node(self, node: yaml.Node, above: tuple[yaml.Node, ...]) -> Node:
        at = self.place(node)
        if any(node is one for one in above):
            raise UserError(f"{at}: this value contains itself")
        if isinstance(node, yaml.MappingNode) and node.tag == TAG + "map":
            return Node(self.mapping(node, (*above, node)), at)
        if isinstance(node, yaml.SequenceNode) and node.tag == TAG + "seq":
            return Node([self.node(item, (*above, node)) for item in node.value], at)
        if isinstance(node, yaml.ScalarNode):
            return Node(self.scalar(node, at), at)
        self.problems.add(at, f"tag {short(node.tag)} means nothing here")
        return Node(None, at)

    def mapping(self, node: yaml.MappingNode, above: tuple[yaml.Node, ...]) -> dict[str, Node]:
        found: dict[str, Node] = {}
        for key, value in node.value:
            at = self.place(key)
            if not isinstance(key, yaml.ScalarNode) or key.tag != TAG + "str":
                said = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                self.problems.add(at, f"a key must be a word, found {said}")
            elif key.value in found:
                first = found[key.value].key
                self.problems.add(
                    at, f'key "{key.value}" is given twice (first in line {first.line if first else "?"})'
                )
            else:
                found[key.value] = replace(self.node(value, above), key=at)
        return found

    def scalar(self, node: yaml.ScalarNode, at: Place) -> Any:
        kind, text = node.tag.removeprefix(TAG), node.value
        if kind == "str":
            return text
        if kind == "null" and NULL.fullmatch(text):
            return None
        if kind == "bool" and BOOL.fullmatch(text):
            return text.lower() == "true"
        if kind == "int" and INT.fullmatch(text):
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        if kind == "float" and (FLOAT.fullmatch(text) or INT.fullmatch(text)):
            value = float(re.sub(r"\.(?=[a-zA-Z])", "", text))
            if not math.isfinite(value):
                self.problems.add(at, f"{text} is not a finite number")
                return 1.0  # stands in, so that nothing more is said of it
            return value
        known = kind in ("null", "bool", "int", "float")
        self.problems.add(at, f"{text!r} is no {kind}" if known else f"tag {short(node.tag)} means nothing here")
        return None


def short(tag: str) -> str:
    return tag.replace(TAG, "!!")


def assignment(text: str, problems: Problems, what: str = "override") -> tuple[str, Node]:
    """`key=value` from the command line, the value read as YAML."""
    at = Place(f'{what} "{text}"')
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not path:
        raise UserError(f"{at}: write key=value, such as train.steps=100")
    return path, moved(parse(value, str(at), problems), at)


def moved(node: Node, at: Place) -> Node:
    """A copy that says it was written at `at`, with all that is inside."""
    value = node.value
    if isinstance(value, dict):
        value = {key: moved(inner, at) for key, inner in value.items()}
    elif isinstance(value, list):
        value = [moved(inner, at) for inner in value]
    return Node(value, at, at)
