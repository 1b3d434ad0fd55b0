"""The check with the code of tasks and mixers: every cell, with the place that wrote the offending value."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mixassay.check import check
from mixassay.errors import UserError
from mixassay.mixers import mixer
from mixassay.sweep import Sweep
from mixassay.texts import unreadable

HEAD = """\
version: 1
name: demo
task: {name: mqar, vocab_size: 64, seq_len: 32, num_kv: 4, train_examples: 1000}
model: {d_model: 32}
train: {epochs: 2}
plugins: [plugged.py]
"""

PLUGIN = '''
from typing import Literal

import torch
from torch import nn

from mixassay.errors import UserError
from mixassay.mixers import Mixer, mixer
from mixassay.tasks import task

built = []


@mixer("plugged")
class Plugged(Mixer):
    def __init__(
        self,
        d_model: int,
        *,
        heads: int = 1,
        scale: float = 1.0,
        kind: Literal["a", "b"] = "a",
        sizes: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        assert isinstance(sizes, tuple)
        if d_model % heads:
            raise UserError(f"heads={heads} does not divide d_model={d_model}")
        self.proj = nn.Linear(d_model, d_model)
        built.append((self.proj.weight.device.type, d_model, heads))


@mixer("even")
class Even(Mixer):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        if d_model % 2:
            raise UserError(f"d_model must be even, got {d_model}")


@mixer("needs_values")
class NeedsValues(Mixer):
    """Reads a tensor while it is built, which the meta device cannot."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.top = torch.arange(d_model).max().item()
        torch.rand(1)


@mixer("frozen")
class Frozen(Mixer):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.basis = torch.nn.Parameter(torch.ones(d_model), requires_grad=False)


@mixer("broken")
class Broken(Mixer):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        raise ZeroDivisionError("no such luck")
'''

MQAR_TABLE = """\
version: 1
name: mqar-table
task: {name: mqar, train_examples: 1000}
train: {epochs: 1}
sweep: {grid: {mixer: [attention, ⟦based, mamba2, ⟦gated_delta_net, {name: ⟦gla, expand_k: 0.5}]}}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    Path("plugged.py").write_text(PLUGIN)
    yield
    for name in ("plugged", "even", "needs_values", "frozen", "broken"):
        mixer._found.pop(name, None)


def load(text: str) -> Sweep:
    Path("sweep.yaml").write_text(text)
    return Sweep.load("sweep.yaml")


def places(text: str) -> tuple[str, list[str]]:
    """The text without its marks `⟦`, and the places they mark."""
    found = []
    for row, line in enumerate(text.split("\n")):
        while "⟦" in line:
            found.append(f"sweep.yaml:{row + 1}:{line.index('⟦') + 1}: ")
            line = line.replace("⟦", "", 1)
    return text.replace("⟦", ""), found


def faults(text: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        check(load(text))
    return str(caught.value).split("\n")


def test_a_right_sweep_passes() -> None:
    check(load(HEAD + "mixer: {name: plugged, heads: 4, sizes: [1, 2]}\nsweep: {grid: {model.d_model: [32, 64]}}\n"))


def test_names_that_nobody_registered_with_the_nearest() -> None:
    text, at = places(MQAR_TABLE)
    found = faults(text)
    assert [line[: len(place)] for line, place in zip(found, at, strict=True)] == at
    assert found[0].startswith(at[0] + 'unknown mixer "based".')
    assert found[1] == at[1] + 'unknown mixer "gated_delta_net". Did you mean "gated_deltanet"?'
    assert found[2].startswith(at[2] + 'unknown mixer "gla".')


FAULTS = {
    "unknown task": (
        HEAD.replace("name: mqar", "name: ⟦mqra") + "mixer: plugged\n",
        'unknown task "mqra". Did you mean "mqar"?',
    ),
    "unknown argument": (
        HEAD + "mixer: {name: plugged, ⟦head: 2}\n",
        'plugged: unknown key "mixer.head". Did you mean "heads"?',
    ),
    "argument that the model supplies": (
        HEAD + "mixer: {name: plugged, ⟦d_model: 2}\n",
        'plugged: unknown key "mixer.d_model". Known: heads, kind, scale, sizes.',
    ),
    "unknown swept argument": (
        HEAD + "mixer: plugged\nsweep: {grid: {⟦mixer.head: [1, 2]}}\n",
        'plugged: unknown key "mixer.head". Did you mean "heads"?',
    ),
    "argument of a wrong type": (
        HEAD + "mixer: plugged\nsweep: {grid: {mixer.heads: [1, ⟦2.5]}}\n",
        "plugged: mixer.heads should be a whole number, got 2.5",
    ),
    "argument outside its choices": (
        HEAD + "mixer: {name: plugged, kind: ⟦c}\n",
        "plugged: mixer.kind should be 'a' or 'b', got \"c\"",
    ),
    "item of a wrong type": (
        HEAD + "mixer: {name: plugged, sizes: [1, ⟦x]}\n",
        'plugged: mixer.sizes.1 should be a whole number, got "x"',
    ),
    "unknown task argument": (
        HEAD.replace("num_kv", "⟦num_kvs") + "mixer: plugged\n",
        'mqar: unknown key "task.num_kvs". Did you mean "num_kv"?',
    ),
    "task that cannot be drawn": (
        HEAD.replace("num_kv: 4", "num_kv: ⟦9") + "mixer: plugged\n",
        "mqar: num_kv=9 needs seq_len >= 36, got 32",
    ),
    "zip row that cannot be drawn": (
        HEAD + "mixer: plugged\nsweep:\n  zip:\n    scale:\n      - {task.seq_len: 32, task.num_kv: 8}\n"
        "      - {task.seq_len: 32, task.num_kv: ⟦9}\n",
        "mqar: num_kv=9 needs seq_len >= 36, got 32 [cell task.seq_len=32, task.num_kv=9]",
    ),
    "eval cell that cannot be drawn": (
        HEAD.replace("num_kv: 4", "num_kv: 4, eval_cells: [{num_kv: 2}, {num_kv: ⟦9}]") + "mixer: plugged\n",
        "mqar: num_kv=9 needs seq_len >= 36, got 32",
    ),
    "unknown argument of a train cell": (
        HEAD.replace("num_kv: 4", "train_cells: [{num_kv: 2}, {⟦num_kb: 4}]") + "mixer: plugged\n",
        'mqar: unknown key "task.num_kb". Did you mean "num_kv"?',
    ),
    "cells of different vocabularies": (
        HEAD.replace("task: {", "task: ⟦{").replace("num_kv: 4", "num_kv: 4, eval_cells: [{}, {vocab_size: 128}]")
        + "mixer: plugged\n",
        "all cells of a task must share one vocabulary, found 64 (task) and 128 (task.eval_cells.1)",
    ),
    "width that does not fit": (
        HEAD + "mixer: plugged\nsweep: {grid: {mixer.heads: [1, ⟦3], model.d_model: [32, 33]}}\n",
        "plugged: heads=3 does not divide d_model=32 [cell mixer.heads=3, model.d_model=32]",
    ),
    "width that does not fit by itself": (
        HEAD.replace("model: {d_model: 32}", "model: {d_model: ⟦33}") + "mixer: even\n",
        "even: d_model must be even, got 33",
    ),
    "hybrid mixer": (
        HEAD.replace("d_model: 32", "d_model: 32, hybrid: {name: plugged, heads: ⟦5}") + "mixer: plugged\n",
        "plugged: heads=5 does not divide d_model=32",
    ),
    "candidate of select": (
        HEAD + "mixer: plugged\nsweep: {select: {axes: {mixer.heads: [1, 2, ⟦3]}, seeds: [9]}}\n",
        "plugged: heads=3 does not divide d_model=32",
    ),
    "cells alike by a default": (
        HEAD + "sweep: {grid: {mixer: [plugged, {name: ⟦plugged, heads: 1}]}}\n",
        "with defaults filled in, (mixer=plugged) and (mixer={name: plugged, heads: 1}) are the same configuration",
    ),
}


TEXT = """\
version: 1
name: texts
task: {name: text, files: [text.txt], tokenizer: bytes, seq_len: 32, valid_examples: 2, test_examples: 2}
train: {loop: lm, steps: 1}
model: {block: swiglu}
mixer: attention
"""
TEXT_FAULTS = {
    "fewer rows than are asked for behind the training": (
        TEXT.replace("test_examples: 2", "test_examples: ⟦99"),
        "text: test_examples: row 98 is asked for, and the test text has 39 rows of 32 tokens",
    ),
    "no row": (TEXT.replace("seq_len: 32", "seq_len: ⟦9000"), "text: seq_len: the "),
    "a sample that does not fit": (
        TEXT.replace("seq_len: 32", "seq_len: 512, samples: [niah_multikey_3], lengths: ⟦[256]"),
        "text: lengths: ruler: niah_multikey_3 at length 256: the smallest prompt and 128 tokens for the answer take",
    ),
}


@pytest.mark.parametrize("case", TEXT_FAULTS)
def test_what_only_the_rows_show(case: str) -> None:
    Path("text.txt").write_text("It was the best of times.\n" * 1000)
    check(load(TEXT))
    text, message = TEXT_FAULTS[case]
    text, at = places(text)
    (found,) = faults(text)
    assert found.startswith(at[0] + message)
    check(load(text), ask=False)


def test_a_text_that_is_not_here_is_told_with_its_place() -> None:
    text, at = places(TEXT.replace("[text.txt]", "⟦[gone.txt]"))
    assert [f"{where}: {what}" for where, what in unreadable(load(text))] == [
        at[0] + "text: files: cannot read gone.txt: No such file or directory"
    ]
    text, at = places(TEXT.replace("[text.txt], tokenizer: bytes", "[moby_dick], tokenizer: ⟦words.json"))
    ((where, what),) = unreadable(load(text))
    assert f"{where}: {what}".startswith(at[0] + "text: tokenizer: no tokenizer at words.json")
    assert not unreadable(load(TEXT.replace("[text.txt]", "text.txt"))), "which the signature refuses"


@pytest.mark.parametrize("case", FAULTS)
def test_fault(case: str) -> None:
    text, message = FAULTS[case]
    text, at = places(text)
    assert faults(text) == [at[0] + message]


def test_a_mixer_that_fails_otherwise_is_told_with_the_line_of_its_code() -> None:
    text, at = places(HEAD + "mixer: ⟦broken\n")
    (found,) = faults(text)
    line = PLUGIN.split("\n").index('        raise ZeroDivisionError("no such luck")') + 1
    assert found == at[0] + f"mixer broken cannot be made: ZeroDivisionError: no such luck (plugged.py:{line})"


def test_a_parameter_that_takes_no_gradient_is_refused() -> None:
    text, at = places(HEAD + "mixer: ⟦frozen\n")
    said = "frozen: parameter basis takes no gradient; what is not trained is a buffer (register_buffer)"
    assert faults(text) == [at[0] + said]


def test_each_distinct_mixer_is_built_once_without_memory() -> None:
    check(
        load(
            HEAD
            + "mixer: plugged\nsweep: {grid: {train.lr: [1, 2, 3], model.d_model: [32, 64], mixer.heads: [1, 2]}}\n"
        )
    )
    (module,) = [
        m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == str(Path.cwd() / "plugged.py")
    ]
    assert sorted(module.built) == [("meta", 32, 1), ("meta", 32, 2), ("meta", 64, 1), ("meta", 64, 2)]


def test_a_mixer_that_the_meta_device_cannot_build_is_built_aside_from_the_global_generator() -> None:
    before = torch.random.get_rng_state()
    check(load(HEAD + "mixer: needs_values\n"))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_plugin_that_is_missing_or_fails() -> None:
    text, at = places(HEAD.replace("[plugged.py]", "[⟦none.py, ⟦bad.py, ⟦no_such_module_here]") + "mixer: attention\n")
    Path("bad.py").write_text("\nimport no_such_module_either\n")
    assert faults(text) == [
        at[0] + "plug-in none.py: no such file",
        at[1]
        + "plug-in bad.py cannot be imported: ModuleNotFoundError: No module named 'no_such_module_either' (bad.py:2)",
        at[2] + "plug-in no_such_module_here cannot be imported: "
        "ModuleNotFoundError: No module named 'no_such_module_here'",
    ]


def test_a_plugin_may_not_take_a_taken_name() -> None:
    Path("plugged.py").write_text(PLUGIN.replace('"plugged"', '"attention"'))
    (found,) = faults(HEAD + "mixer: attention\n")
    assert found.startswith('sweep.yaml:6:11: plug-in plugged.py: mixer "attention" is taken;')
