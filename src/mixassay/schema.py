"""The JSON schema of a sweep file, for editors: `# yaml-language-server: $schema=sweep-v1.json`.

It holds the arguments of every task and mixer that can be found, so it differs with the installed plug-ins. Editors
read draft 7, pydantic writes 2020-12; `draft7` translates. No section requires a key: a sweep or `extends` may give it.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from mixassay.check import GIVEN
from mixassay.fields import SECTIONS
from mixassay.mixers import mixer
from mixassay.registry import Registry, arguments
from mixassay.settings import Report, Run, Selection
from mixassay.spec import TaskSpec, TrainSpec
from mixassay.sweep import KEYS, VERSION
from mixassay.tasks import task

Schema = dict[str, Any]

DIGITS: Schema = {"type": "string", "pattern": "^[-+]?[0-9]+(_[0-9]+)+$"}
"""100_000, which editors take for a word."""

SEEDS: Schema = {
    "description": 'A list, or a range such as "0-4".',
    "anyOf": [
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {"type": "string", "pattern": "^[0-9]+-[0-9]+$"},
    ],
}


def json_schema() -> Schema:
    """The schema, draft 7, with all tasks and mixers that are registered or can be imported."""
    tasks, mixers = signatures(task), signatures(mixer, GIVEN)
    shared = properties(TaskSpec)
    for kind, more in (("train", {"examples": {"type": "integer"}, "weight": {"type": "number"}}), ("eval", {})):
        cell = record({name: either(s) for name, s in gathered(tasks).items()} | more)
        shared[f"{kind}_cells"] = {"type": "array", "items": cell}
    definitions = {
        "task": named({name: shared | own for name, own in tasks.items()}),
        "mixer": named(mixers),
        "model": record(properties(SECTIONS["model"]) | {"hybrid": either([ref("mixer"), {"type": "null"}])}),
        "train": record(properties(TrainSpec)),
        "report": record(properties(Report)),
        "run": record(properties(Run)),
    }
    values = swept(definitions, shared, tasks, mixers)
    definitions |= {
        "settings": record(values),
        "axes": record({path: axis(ref("settings", path)) for path in values}),
        "conditions": record({path: one_or_any(ref("settings", path)) for path in values}),
        "logspace": numbers("logspace", 3),
        "range": numbers("range", 2),
        "sweep": sweep_section(),
    }
    top: Schema = {
        "version": {"const": VERSION},
        "name": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]*$"},
        "plugins": {"type": "array", "items": {"type": "string"}},
        "extends": {
            "type": "string",
            "description": "A file, or the name of a shipped sweep, whose mappings this one is merged into.",
        },
        "seeds": SEEDS,
    }
    top |= {key: ref(key) for key in KEYS if key in definitions}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": f"mixassay sweep, version {VERSION}"}
    found = draft7(head | record(top) | {"definitions": definitions})
    assert isinstance(found, dict)
    return found


def signatures(registry: Registry[Any], given: tuple[str, ...] = ()) -> dict[str, Schema]:
    """name -> argument -> schema. What cannot be imported here, for want of a dependency, is left out."""
    found = {}
    for name in registry.names():
        try:
            found[name] = properties(arguments(registry[name], given))
        except ImportError:
            continue
    return found


def properties(model: type[BaseModel]) -> Schema:
    """field -> schema, with what it refers to put in place."""
    schema = model.model_json_schema()
    return {name: inlined(field, schema.get("$defs", {})) for name, field in schema.get("properties", {}).items()}


def inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(schema, list):
        return [inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: inlined(value, definitions) for key, value in schema.items() if key not in ("title", "required")}


def named(choices: Mapping[str, Schema]) -> Schema:
    """A name, or a mapping with the fields of one of the choices."""
    mappings = [record(own | {"name": {"const": name}}) | {"title": name} for name, own in choices.items()]
    return either([{"enum": list(choices)}, *mappings])


def swept(definitions: Mapping[str, Schema], shared: Schema, tasks: Mapping[str, Schema], mixers: Any) -> Schema:
    """path -> schema of one value, for all paths that a sweep may set."""
    values: Schema = {name: ref(name) for name in SECTIONS}
    values |= {"task.name": {"enum": list(tasks)}, "mixer.name": {"enum": list(mixers)}}
    values |= {f"task.{name}": schema for name, schema in shared.items() if name != "name"}
    values |= {f"task.{name}": either(found) for name, found in gathered(tasks).items()}
    values |= {f"mixer.{name}": either(found) for name, found in gathered(mixers).items()}
    for section in ("model", "train"):
        values |= {f"{section}.{name}": schema for name, schema in definitions[section]["properties"].items()}
    stop = next(s for s in values["train.stop"]["anyOf"] if "properties" in s)
    return values | {f"train.stop.{name}": schema for name, schema in stop["properties"].items()}


def gathered(choices: Mapping[str, Schema]) -> dict[str, list[Schema]]:
    """argument -> its different schemas among the choices."""
    found: dict[str, list[Schema]] = {}
    for own in choices.values():
        for name, schema in own.items():
            bare = {key: value for key, value in schema.items() if key != "default"}
            if bare not in found.setdefault(name, []):
                found[name].append(bare)
    return found


def sweep_section() -> Schema:
    select = {"axes": ref("axes"), "by": properties(Selection)["by"], "seeds": SEEDS}
    when = record({"if": ref("conditions"), "set": ref("settings")}) | {"required": ["if", "set"]}
    return record(
        {
            "grid": ref("axes"),
            "zip": {"type": "object", "additionalProperties": {"type": "array", "items": ref("settings")}},
            "select": record(select) | {"type": ["object", "null"]},  # null takes a base's away
            "when": {"type": "array", "items": when},
            "exclude": {"type": "array", "items": ref("conditions")},
        }
    )


def axis(value: Schema) -> Schema:
    return either([{"type": "array", "items": value, "minItems": 1}, ref("logspace"), ref("range")])


def numbers(name: str, n: int) -> Schema:
    """{name: [n numbers]}"""
    listed = {"type": "array", "items": {"type": "number"}, "minItems": n, "maxItems": n}
    return record({name: listed}) | {"required": [name]}


def one_or_any(value: Schema) -> Schema:
    return either([value, {"type": "array", "items": value}])


def record(fields: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": fields}


def either(schemas: list[Schema]) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def ref(name: str, field: str = "") -> Schema:
    return {"$ref": f"#/definitions/{name}" + (f"/properties/{field}" if field else "")}


def draft7(schema: Any) -> Any:
    """Fixed-length arrays as draft 7 has them, and numbers with grouped digits allowed."""
    if isinstance(schema, list):
        return [draft7(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: draft7(value) for key, value in schema.items()}
    if "prefixItems" in found:
        found |= {"items": found.pop("prefixItems"), "additionalItems": False}
    if found.get("type") in ("integer", "number"):
        about = {key: found.pop(key) for key in ("default", "description", "title") if key in found}
        return about | {"anyOf": [found, DIGITS]}
    return found
