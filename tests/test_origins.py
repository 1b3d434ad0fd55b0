"""The resolved configuration, and where each value came from."""

from pathlib import Path

import pytest
import yaml

from mixassay.origins import resolved_text
from mixassay.sweep import Sweep

BASE = """\
version: 1
name: base
task: {name: mqar, train_examples: 1000}
train: {epochs: 2, stop: {above: 0.9}}
"""

CHILD = """\
extends: base.yaml
name: child
mixer: {name: attention, heads: 2}
sweep:
  grid: {model.d_model: [16, 32]}
  select: {axes: {train.lr: [0.1, 0.2]}, seeds: [7]}
seeds: 0-4
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE)
    Path("child.yaml").write_text(CHILD)


def lines(*overrides: str) -> dict[str, tuple[str, str]]:
    """Last part of the path -> (value, origin)."""
    text = resolved_text(Sweep.load("child.yaml", overrides))
    found = {}
    for line in text.split("\n"):
        entry, _, origin = line.partition("  # ")
        key, _, value = entry.strip().partition(": ")
        if value:
            found[key] = value, origin
    return found


def test_every_value_names_its_origin() -> None:
    found = lines("train.clip=1.0")
    assert found["train_examples"] == ("1000", "base.yaml:3:36")
    assert found["above"] == ("0.9", "base.yaml:4:34")
    assert found["heads"] == ("2", "child.yaml:3:33")
    assert found["d_model"] == ("16 | 32", "child.yaml:5:26, child.yaml:5:30")
    assert found["lr"] == ("0.1 | 0.2", "selected, child.yaml:6:29")
    assert found["clip"] == ("1.0", 'override "train.clip=1.0"')
    assert found["block"] == ("zoology", "default")
    assert found["seeds"][0] in ("[0, 1, 2, 3, 4]", "[7]")
    assert found["retries"] == ("1", "default")


def test_it_counts_the_runs_and_is_yaml_itself() -> None:
    text = resolved_text(Sweep.load("child.yaml"))
    assert text.startswith("# 2 cells, 4 tuning + 10 reported runs\n")
    data = yaml.safe_load(text)
    assert data["name"] == "child"
    assert data["train"]["stop"] == {"metric": "valid/accuracy", "above": 0.9, "below": None}
    assert set(data) == {"name", "task", "mixer", "model", "train", "seeds", "select", "report", "run"}


def test_one_cell_is_shown_by_only() -> None:
    text = resolved_text(Sweep.load("child.yaml").only({"model.d_model": 32}))
    assert yaml.safe_load(text)["model"]["d_model"] == 32
