"""How values, paths and seeds are written for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel


def show(value: Any) -> str:
    """A swept value: `{"name": "gla", "expand_k": 0.5}` is `gla expand_k=0.5`."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return " ".join([str(value[k]) if k == "name" else f"{k}={show(value[k])}" for k in value])
    if isinstance(value, list | tuple):
        return "[" + ", ".join(show(item) for item in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def pairs(values: Mapping[str, Any]) -> str:
    """`mixer=gla d_model=64`, keys cut to their last part."""
    return " ".join(f"{short(path)}={show(value)}" for path, value in values.items())


def short(path: str) -> str:
    return path.rsplit(".", 1)[-1]


def spans(seeds: Sequence[int]) -> str:
    """`0-4, 7`"""
    runs: list[list[int]] = []
    for seed in sorted(seeds):
        if runs and seed == runs[-1][-1] + 1:
            runs[-1].append(seed)
        else:
            runs.append([seed])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def find(config: Mapping[str, Any], path: str) -> Any:
    """What is at a dotted path: `find(config, "model.d_model")`, or None."""
    value: Any = config
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
