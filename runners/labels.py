"""How values, paths and seeds are written for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from mixassay.spec import plain


def pairs(values: Mapping[str, Any]) -> str:
    """`mixer=mamba2 (d_state=16) num_kv=4`, paths cut to their last part."""
    return " ".join(f"{short(path)}={named(value)}" for path, value in values.items())


LONG = 40  # characters of a table's head


def heads(labels: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each of them as `pairs`. Where one is too long for the head of a column, all go without the fields that are not
    needed to tell them apart, the last first."""
    kept = list(dict.fromkeys(name for label in labels for name in label))

    def texts() -> list[str]:
        return [pairs({name: label[name] for name in kept if name in label}) for label in labels]

    apart = len(set(texts()))
    for name in reversed(kept[:]):
        if len(kept) == 1 or max(map(len, texts()), default=0) <= LONG:
            break
        at = kept.index(name)
        kept.remove(name)
        if len(set(texts())) < apart:
            kept.insert(at, name)
    return texts()


def named(value: Any) -> str:
    """`mamba2 (d_state=16)` for a mapping with a name, any other value as in YAML."""
    if not isinstance(value, Mapping) or "name" not in value:
        return plain(value)
    args = " ".join(f"{key}={plain(arg)}" for key, arg in value.items() if key != "name")
    return f"{value['name']} ({args})" if args else str(value["name"])


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


def binary(n: float) -> str:
    """1024 is 1K."""
    for unit in ("", "K", "M"):
        if n < 1024:
            return f"{n:g}{unit}"
        n /= 1024
    return f"{n:g}G"
