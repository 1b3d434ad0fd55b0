"""The fields of a sweep file: which config paths exist, and what pydantic says of a value, at the value's place."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from mixassay.registry import suggest
from mixassay.source import Node, Place, Problems
from mixassay.spec import Sections

M = TypeVar("M", bound=BaseModel)

SECTIONS: dict[str, type[BaseModel]] = {
    name: field.annotation for name, field in Sections.model_fields.items() if isinstance(field.annotation, type)
}


def is_path(path: str) -> bool:
    """Whether a dotted path is a config field, or may be an argument of a task or mixer."""
    section, *rest = path.split(".")
    return section in SECTIONS and has_field(SECTIONS[section], rest)


def has_field(model: type[BaseModel], parts: Sequence[str]) -> bool:
    if not parts:
        return True
    if parts[0] not in model.model_fields:
        return model.model_config.get("extra") == "allow"
    inner = inner_model(model.model_fields[parts[0]].annotation)
    return len(parts) == 1 or (inner is not None and has_field(inner, parts[1:]))


def inner_model(annotation: Any) -> type[BaseModel] | None:
    """The model in `Model` or `Model | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := inner_model(part))), None)


def known_paths() -> list[str]:
    """Every config path, but for the arguments of tasks and mixers, which only their code knows."""

    def below(model: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, field in model.model_fields.items():
            yield f"{prefix}.{name}"
            inner = inner_model(field.annotation)
            if inner:
                yield from below(inner, f"{prefix}.{name}")

    return [path for name, model in SECTIONS.items() for path in (name, *below(model, name))]


def default(path: str) -> Any:
    """The value of a field that nobody set; None where it has no default."""
    section, _, field = path.partition(".")
    fields = SECTIONS[section].model_fields
    found = fields[field].get_default() if field in fields and not fields[field].is_required() else None
    return json.loads(found.model_dump_json()) if isinstance(found, BaseModel) else found


def validate(
    model: type[M],
    node: Node,
    path: str,
    problems: Problems,
    *,
    given: dict[str, Any] | None = None,
    partial: bool = False,
) -> M | None:
    """The node's data as a pydantic model, read as JSON so that lists serve as tuples; None when there are problems.

    `given` are fields that the node does not hold. `partial` leaves missing fields unmentioned.
    """
    data = node.plain()
    try:
        return model.model_validate_json(json.dumps(data | (given or {}) if isinstance(data, dict) else data))
    except ValidationError as fault:
        for at, message in explained(fault, model, node, path, partial):
            problems.add(at, message)
    return None


def explained(
    fault: ValidationError, model: type[BaseModel], node: Node, path: str, partial: bool = False
) -> Iterator[tuple[Place, str]]:
    """Pydantic's complaints as ours: at the place of the value, by its dotted path, with a suggestion if near."""
    wrong: dict[str, tuple[Place, list[str], Any]] = {}
    for error in fault.errors(include_url=False):
        inside: list[str] = []
        at = node
        for part in error["loc"]:
            below = at.child(part)
            if below is None:
                break
            at, inside = below, [*inside, str(part)]
        name = dotted(path, *inside)
        if error["type"] == "missing":
            if not partial:
                yield at.at, f'"{".".join([path, *map(str, error["loc"])])}" is missing'
        elif error["type"] == "extra_forbidden":
            owner = model_at(model, inside[:-1])
            known = list(owner.model_fields) if owner else []
            yield at.key or at.at, f'unknown key "{name}".{suggest(inside[-1], known)}'
        elif error["type"] == "value_error":
            yield at.at, f"{name}: {error['msg'].removeprefix('Value error, ')}"
        else:
            wrong.setdefault(name, (at.at, [], error["input"]))[1].append(wanted(error["msg"]))
    for name, (place, wants, got) in wrong.items():
        choices = [word for want in wants for word in re.findall(r"'([^']*)'", want)]
        near = suggest(got, choices) if isinstance(got, str) and choices else ""
        near = near if "Did you mean" in near else ""
        yield place, f"{name} should be {' or '.join(wants)}, got {shown(got)}.{near}".removesuffix(".")


def wanted(message: str) -> str:
    """What pydantic says a value should be, in the words of YAML."""
    for said, meant in (
        ("Input should be ", ""),
        ("a valid integer", "a whole number"),
        ("a valid number", "a number"),
        ("a valid string", "a word"),
        ("a valid boolean", "true or false"),
        ("a valid array", "a list"),
        ("an object", "a mapping"),
    ):
        message = message.replace(said, meant)
    return message


def model_at(model: type[BaseModel], parts: Sequence[str]) -> type[BaseModel] | None:
    for part in parts:
        inner = inner_model(model.model_fields[part].annotation) if part in model.model_fields else None
        if inner is None:
            return None
        model = inner
    return model


def shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def dotted(*parts: str) -> str:
    return ".".join(part for part in parts if part)
