"""A file of an audit: streams, policies and seeds, read as strictly as a sweep.

version: 1
name: noise                                   # results/audit/noise/
stream: {tokens: 512, segments: 8}            # what all streams share
streams: {quiet: {sigma: 0.1}, loud: {sigma: 0.5}}
capacity: 10                                  # slots
policies: [single, fixed, {name: dla, rule: ward, tau: tuned}]
seeds: 0-4
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from mixassay.errors import UserError
from mixassay.fields import explained, shown, validate
from mixassay.grammar import mapping, parse_seeds, sequence
from mixassay.kernels.dla.boundaries import Reading
from mixassay.kernels.dla.slots import Rule
from mixassay.layers import override
from mixassay.registry import arguments, bind, suggest
from mixassay.source import Node, Place, Problems, read
from mixassay.spec import Count, Positive, Spec
from mixassay.tasks.streams.recall import RecallStream
from mixassay.tasks.streams.segmented import SegmentedStream

VERSION = 1
PLAIN = ("single", "fixed", "fenwick", "window", "oracle", "optimal")
KEYS = (
    *("version", "name", "title", "stream", "streams", "capacity", "policies", "seeds", "tuning"),
    *("prefixes", "tolerance"),
)


Stream = SegmentedStream | RecallStream
KINDS: dict[str, type[Stream]] = {"segmented": SegmentedStream, "recall": RecallStream}
"""A stream's `kind`; the first where none is given."""


class Plain(Spec):
    """A policy without arguments. single: all in one slot. fixed: blocks of tokens / capacity. fenwick: log-linear
    attention's. window: the last capacity - 1 tokens each, and the rest. oracle: at the true changes, the best of them
    where there are too many. optimal: the least bound that `capacity` blocks can have."""

    name: Literal["single", "fixed", "fenwick", "window", "oracle", "optimal"]

    def __str__(self) -> str:
        return self.name


class Dla(Spec):
    """Dynamic linear attention. tau: a number, or "tuned": the one with the least bound on other streams, at the
    audit's capacity. capacity: "unlimited" for boundaries without merges."""

    name: Literal["dla"]
    rule: Rule = "density"
    tau: Annotated[float, Field(ge=0)] | Literal["tuned"] = 0.6
    reading: Reading = "memory"
    capacity: Literal["same", "unlimited"] = "same"

    def __str__(self) -> str:
        parts = ["dla", f"tau {self.tau if self.tau == 'tuned' else f'{self.tau:g}'}"]
        parts += [self.rule] if self.capacity == "same" else ["unlimited"]
        return " ".join([*parts, *([self.reading] if self.reading != "memory" else [])])


Policy = Plain | Dla


class Head(Spec):
    """What a file says besides its streams, policies and seeds."""

    name: str
    title: str | None = None
    capacity: Annotated[int, Field(ge=2)]
    prefixes: Positive = 6  # ends in the second half of the stream that numbers are means over
    tolerance: Count = 2  # tokens that a boundary may be off


class Tuning(Spec):
    """How tau is chosen: on validation streams of these seeds, among these values."""

    seeds: tuple[int, ...] = (0, 1, 2)
    taus: tuple[Annotated[float, Field(ge=0)], ...] = (
        0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3,
    )  # fmt: skip


@dataclass(frozen=True)
class Audit:
    """A loaded file."""

    path: Path
    head: Head
    streams: dict[str, Stream]
    policies: tuple[Policy, ...]
    seeds: tuple[int, ...]
    tuning: Tuning

    @classmethod
    def load(cls, path: Path | str, overrides: Iterable[str] = ()) -> "Audit":
        """The audit in a file, with `key=value` overrides. Raises `UserError` with one line for every fault found."""
        found = Problems()
        root = read(path, found)
        if not isinstance(root.value, dict):
            raise UserError(f"{root.at}: an audit file is a mapping, got {shown(root.plain())}")
        root = override(root, overrides, found)
        parts = mapping(root, "", found, known=KEYS)
        version = parts.get("version")
        if version is None or version.plain() != VERSION:
            found.add(version.at if version else root.at, f"version should be {VERSION}")
        head = _head(root, parts, found)
        streams = _streams(root, parts, found)
        policies = _policies(root, parts, found)
        seeds = parse_seeds(parts["seeds"], "seeds", found) if "seeds" in parts else (0,)
        tuning = _tuning(parts.get("tuning"), found)
        found.raise_any()
        assert head is not None
        return cls(Path(path), head, streams, policies, seeds, tuning)


def _head(root: Node, parts: dict[str, Node], found: Problems) -> Head | None:
    node = Node({key: value for key, value in parts.items() if key in Head.model_fields}, root.at)
    head = validate(Head, node, "", found)
    if head is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", head.name):
        found.add(node.nearest("name").at, f"name should be letters, digits, dot, dash and underscore, got {head.name}")
    return head


def _streams(root: Node, parts: dict[str, Node], found: Problems) -> dict[str, Stream]:
    """Each with what they share, made; their complaints at the value they name."""
    shared = Node(mapping(parts.get("stream"), "stream", found), root.at)
    named = mapping(parts.get("streams"), "streams", found)
    if not named:
        found.add(parts["streams"].at if "streams" in parts else root.at, '"streams" is missing: name -> what differs')
    made: dict[str, Stream] = {}
    for name, written in named.items():
        path = f"streams.{name}"
        node = shared.merge(Node(mapping(written, path, found), written.at, written.key))
        kind = node.value.pop("kind", Node(next(iter(KINDS)), node.at))
        cls = KINDS.get(str(kind.plain()))
        if cls is None:
            found.add(
                kind.at, f"{path}.kind: unknown kind {shown(kind.plain())}.{suggest(str(kind.plain()), [*KINDS])}"
            )
            continue
        try:
            made[name] = cls(**bind(cls, node.plain()))
        except ValidationError as fault:
            for at, message in explained(fault, arguments(cls), node, path):
                found.add(at, message)
        except UserError as fault:
            found.add(_blamed(str(fault), node), f"{path}: {fault}")
    return made


def _blamed(message: str, node: Node) -> Place:
    """Where the first value was written that a complaint names."""
    words = [word for word in re.findall(r"\w+", message) if word in node.value]
    return node.value[words[0]].at if words else node.key or node.at


def _policies(root: Node, parts: dict[str, Node], found: Problems) -> tuple[Policy, ...]:
    given = sequence(parts.get("policies"), "policies", found)
    if not given:
        found.add(parts["policies"].at if "policies" in parts else root.at, '"policies" is missing: a list')
    made: list[Policy] = []
    for i, node in enumerate(given):
        node = Node({"name": node}, node.at) if isinstance(node.value, str) else node
        inside = mapping(node, f"policies.{i}", found)
        if isinstance(node.value, dict):
            name = inside["name"].plain() if "name" in inside else None
            if name not in (*PLAIN, "dla"):
                near = suggest(str(name), [*PLAIN, "dla"])
                found.add(node.nearest("name").at, f"policies.{i}: unknown policy {shown(name)}.{near}")
                continue
            model: type[Plain] | type[Dla] = Dla if name == "dla" else Plain
            policy = validate(model, node, f"policies.{i}", found)
            if policy in made:
                found.add(node.at, f"policies.{i}: {policy} is given twice")
            elif policy is not None:
                made.append(policy)
    return tuple(made)


def _tuning(node: Node | None, found: Problems) -> Tuning:
    parts = mapping(node, "tuning", found)
    given: dict[str, Any] = {}
    if "seeds" in parts:
        given["seeds"] = parse_seeds(parts["seeds"], "tuning.seeds", found)
    if "taus" in parts and parts["taus"].value == []:
        found.add(parts["taus"].at, "tuning.taus is empty")
    rest = Node({k: v for k, v in parts.items() if k != "seeds"}, node.at if node else Place(""))
    return validate(Tuning, rest, "tuning", found, given=given) or Tuning()
