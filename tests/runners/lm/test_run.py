"""A language model through `mixassay run`: its record, its kept files, and the name that its text gives it."""

import json
from pathlib import Path
from typing import Any

import pytest

import mixassay
from mixassay import corpus, tokens
from mixassay.runners.recorder import Recorder
from mixassay.sweep import Sweep

LM = """
version: 1
name: lm
task:
  name: text
  files: [text]
  tokenizer: bpe-260
  seq_len: 32
  valid_examples: 4
  test_examples: 4
model: {n_layers: 1, d_model: 16, block: swiglu}
train: {loop: lm, steps: 4, batch_size: 4, precision: bf16, eval_every: 2}
mixer: attention
seeds: [0]
report: {metric: test/loss}
run: {slots: 1, keep_weights: true}
"""


@pytest.fixture
def written(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("".join(f"Line {n} of {n * n}, the other one.\n" for n in range(400)))
    corpus.read.cache_clear()
    corpus.tokenizer.cache_clear()
    return tmp_path


def test_a_language_model_from_the_file_to_its_record(place: Any, written: Path) -> None:
    pytest.importorskip("tokenizers")
    place.monkeypatch.setenv("XDG_CACHE_HOME", str(written / "cache"))
    said = place.run("run", place.write(LM))
    assert said.code == 0, said.err
    assert "worker 0: attention seed 0: step 2, " in said.out
    (record,) = place.records("lm")
    (kept,) = written.glob("cache/mixassay/tokenizers/*/tokenizer.json")
    words = tokens.load(kept)
    assert record.data == f"text/1 text:{corpus.read(('text',), 0.05).sha256[:16]} tokenizer:{words.identity[:23]}"
    assert record.language is not None
    assert record.language.tokens_per_second > 0
    assert record.language.mfu is None, "the peak of a CPU is not known"
    assert [(p.split, len(p.at)) for p in record.language.positions] == [("valid", 32), ("test", 32)]
    assert record.metrics["test/bits_per_byte"] is not None
    folder = written / "results/lm/.weights"
    assert (folder / f"{record.key}.tokenizer.json").read_bytes() == kept.read_bytes()
    model = mixassay.load(record.key)
    assert sum(p.numel() for p in model.parameters()) == record.params
    again = place.run("run", "tiny.yaml", "--json")
    assert [json.loads(line)["event"] for line in again.out.splitlines()] == ["end"], "nothing is trained twice"


def test_other_text_is_another_run(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(written)
    (written / "lm.yaml").write_text(LM.replace("bpe-260", "bytes"))
    sweep = Sweep.load("lm.yaml")
    (run,) = sweep.reported(sweep.cells()[0])
    before = Recorder("cpu", threads=1).key(run)
    corpus.read.cache_clear()
    assert Recorder("cpu", threads=1).key(run) == before
    with (written / "text" / "a.txt").open("a") as file:
        file.write("One more line.\n")
    corpus.read.cache_clear()
    assert Recorder("cpu", threads=1).key(run) != before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.dropout=0.1"}, "train.loop: lm has no dropout"),
        ({"task.files=[nowhere.txt]"}, "cannot read nowhere.txt"),
        ({"train.loop=stack", "run.ranks=2"}, "run.ranks=2 is for language models alone"),
        ({"run.ranks=3"}, "batch_size=4 must be a multiple of run.ranks=3"),
    ],
)
def test_mistakes(changes: set[str], said: str, place: Any, written: Path) -> None:
    found = place.run("run", place.write(LM.replace("bpe-260", "bytes")), *sorted(changes))
    assert found.code == 2, found.out
    assert said in found.err
