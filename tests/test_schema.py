"""The JSON schema that editors read: draft 7, accepting what the program accepts and refusing what it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mixassay.schema import json_schema
from mixassay.source import Problems, parse, read

ROOT = Path(__file__).parents[1]
CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "audit")  # no sweeps

GOOD = """\
version: 1
name: demo
extends: base.yaml
plugins: [ema.py]
task:
  name: mqar
  vocab_size: 8192
  train_examples: endless
  data_seed: 3
  train_cells: [{num_kv: 4, examples: 1000, weight: 0.5}, {num_kv: 8, examples: 10}]
  eval_cells: [{seq_len: 64}]
mixer: {name: attention, heads: 2, rope: true}
model: {n_layers: 4, block: swiglu, hybrid: base_conv}
train: {steps: 10, betas: [0.9, 0.95], clip: null, stop: {above: 0.9}}
sweep:
  grid: {mixer: [attention, {name: mamba2, d_state: 16}], model.d_model: [64, 128], model.n_layers: {range: [1, 3]}}
  zip: {scale: [{task.seq_len: 64, train.batch_size: 8}, {task.seq_len: 128, train.batch_size: 4}]}
  select: {axes: {train.lr: {logspace: [0.0001, 0.01, 4]}}, by: valid/loss, seeds: 100-101}
  when: [{if: {mixer: mamba2}, set: {model.block: mamba, train.stop.above: 0.9}}]
  exclude: [{mixer: attention, model.d_model: [64, 128]}]
seeds: 0-4
report: {metric: test/accuracy, columns: [task.seq_len], compare: {margin: 0.02}}
run: {device: cuda, slots: 2, threads: auto, timeout: 45m, checkpoint_every: 30}
"""


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = json_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


def errors(validator: Any, data: Any) -> list[str]:
    return sorted({error.json_path for error in validator.iter_errors(data)})


def as_editors_read(text: str) -> Any:
    return parse(text, "f", Problems()).plain()


def test_it_speaks_draft_7(validator: Any) -> None:
    text = str(validator.schema)
    assert validator.schema["$schema"] == "http://json-schema.org/draft-07/schema#"
    assert "prefixItems" not in text
    assert "$defs" not in text


def test_a_file_that_uses_everything_is_accepted(validator: Any) -> None:
    assert errors(validator, as_editors_read(GOOD)) == []
    grouped = as_editors_read(GOOD)
    grouped["task"]["train_examples"] = "100_000"  # what an editor makes of 100_000
    assert errors(validator, grouped) == []


def test_the_file_in_the_repository_is_current() -> None:
    """In a process of its own: here other tests may have registered mixers."""
    code = "import json; from mixassay.schema import json_schema; print(json.dumps(json_schema()))"
    env = {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    stored = (ROOT / "schema/sweep-v1.json").read_text()
    assert json.loads(stored) == json.loads(done.stdout), "run: mixassay schema > schema/sweep-v1.json"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_shipped_configs_are_accepted(path: Path, validator: Any) -> None:
    assert errors(validator, read(path, Problems()).plain()) == []


BAD = {
    "trian: {}": "$",
    "name: a/b": "$.name",
    "version: 2": "$.version",
    "task: {name: mqra}": "$.task",
    "task: {name: mqar, num_kvs: 3}": "$.task",
    "mixer: mambo": "$.mixer",
    "mixer: {name: mamba2, rope: true}": "$.mixer",
    "model: {block: zoolgy}": "$.model.block",
    "model: {d_modl: 3}": "$.model",
    "train: {betas: [0.9]}": "$.train.betas",
    "train: {betas: [0.9, 0.9, 0.9]}": "$.train.betas",
    "train: {lr: 0}": "$.train.lr",
    "train: {stop: {metric: test/accuracy}}": "$.train.stop",
    "sweep: {grid: {model.dmodel: [1]}}": "$.sweep.grid",
    "sweep: {grid: {model.d_model: 1}}": "$.sweep.grid['model.d_model']",
    "sweep: {select: {by: test/accuracy}}": "$.sweep.select.by",
    "sweep: {when: [{if: {mixer: mamba2}}]}": "$.sweep.when[0]",
    "sweep: {exclude: [{mixr: mamba2}]}": "$.sweep.exclude[0]",
    "seeds: 5": "$.seeds",
    "report: {metric: accuracy}": "$.report.metric",
    "run: {timeout: 45x}": "$.run.timeout",
}


@pytest.mark.parametrize("text", BAD)
def test_what_the_program_refuses_is_refused(text: str, validator: Any) -> None:
    assert errors(validator, as_editors_read(text)) == [BAD[text]]
