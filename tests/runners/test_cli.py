"""The command line on good and bad input: what it says, its exit code, and that nothing is lost."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mixassay.runners import cli

TINY = Path(__file__).with_name("tiny.yaml").read_text()

NAN = """\
import torch
from mixassay.mixers import Mixer, mixer

@mixer("broken")
class Broken(Mixer):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(d_model))

    def forward(self, x):
        return x * self.gain * float("nan")
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the records of TINY."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tiny.yaml").write_text(TINY)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-P", "-m", "mixassay", "run", "tiny.yaml"]
    subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True)
    return folder


MISTAKES = {
    "misspelt key": (
        TINY.replace("batch_size", "batchsize"),
        'tiny.yaml:5:20: unknown key "train.batchsize". Did you mean "batch_size"?',
    ),
    "duplicate key": (TINY + "seeds: [3]\n", 'tiny.yaml:9:1: key "seeds" is given twice (first in line 7)'),
    "cannot be generated": (
        TINY.replace("num_kv: 2", "num_kv: 8"),
        "tiny.yaml:3:57: mqar: num_kv=8 needs seq_len >= 32, got 16",
    ),
    "unknown mixer": (
        TINY.replace("mixer: attention", "mixer: atention"),
        'tiny.yaml:6:8: unknown mixer "atention". Did you mean "attention"?',
    ),
    "wrong argument of a mixer": (
        TINY.replace("mixer: attention", "mixer: {name: attention, head: 2}"),
        'tiny.yaml:6:26: attention: unknown key "mixer.head". Did you mean "heads"?',
    ),
    "sizes that do not fit": (
        TINY.replace("mixer: attention", "mixer: {name: attention, heads: 3}"),
        "tiny.yaml:6:33: attention: ",
    ),
    "selection on test": (
        TINY + "sweep: {select: {axes: {train.lr: [0.1, 0.2]}, by: test/accuracy, seeds: [9]}}\n",
        'tiny.yaml:9:52: sweep.select.by: a test metric ("test/accuracy") here biases the report; use valid/accuracy',
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("verb", ["validate", "run"])
def test_a_mistake_in_the_file_is_one_line_with_its_place(place: Any, verb: str, mistake: str) -> None:
    text, message = MISTAKES[mistake]
    said = place.run(verb, place.write(text))
    assert said.code == 2
    assert said.err.startswith(message)
    assert len(said.err.splitlines()) == 1
    assert "Traceback" not in said.out
    assert not place.records(), "nothing was trained"


def test_a_text_that_is_not_here_is_no_fault_of_the_file(place: Any) -> None:
    """It may be validated on a laptop and run on a cluster."""
    task = "{name: text, files: [gone], tokenizer: bytes}"
    lines = [f"task: {task}" if line.startswith("task:") else line for line in TINY.splitlines()]
    text, column = "\n".join([*lines, ""]).replace("epochs: 2", "steps: 2"), 7 + task.index("[gone]")
    at = f"tiny.yaml:3:{column}: text: files: cannot read gone: No such file or directory"
    said = place.run("validate", place.write(text))
    assert said.code == 0
    assert said.err == f"note: {at}; a run needs it\n"
    said = place.run("run", "tiny.yaml")
    assert said.code == 2
    assert said.err == f"{at}\n"
    said = place.run("run", "tiny.yaml", "task.files=moby_dick")
    assert said.err == 'override "task.files=moby_dick": text: task.files should be a list, got "moby_dick"\n'


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "nowhere.yaml"], "no such file"),
        (["run"], "FILE"),
        (["run", "tiny.yaml", "--mode", "sometimes"], "sometimes"),
        (["run", "tiny.yaml", "--shard", "3/2"], "--shard should be I/N"),
        (["run", "tiny.yaml", "--max-time", "soon"], "--max-time should be a time"),
        (["run", "tiny.yaml", "--device", "tpu"], "--device should be"),
        (["run", "tiny.yaml", "train.stepz=3"], 'Did you mean "steps"?'),
        (["report", "tiny.yaml"], "`mixassay run tiny.yaml` makes it"),
        (["new", "mixer", "class"], "class is taken"),
        (["new", "mixer", "attention"], "attention is taken"),
        (["new", "mixer", "random"], "random.py would hide the Python module random"),
        (["new", "mixer", "mine", "--dir", "tiny.yaml/below"], "cannot write to tiny.yaml/below: Not a directory"),
        (["lost"], "lost"),
    ],
)
def test_a_mistake_on_the_command_line(place: Any, words: list[str], message: str) -> None:
    place.write(TINY)
    said = place.run(*words)
    assert said.code == 2
    assert message in said.err
    assert "Traceback" not in said.err


def test_ctrl_c_while_the_verbs_are_imported_is_no_traceback(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "load_verbs", lambda: os.kill(os.getpid(), signal.SIGINT))
    said = place.run("list", "tasks")
    assert (said.code, said.out, said.err) == (130, "", "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_no_cuda_where_it_is_asked_for(place: Any) -> None:
    said = place.run("run", place.write(TINY), "--device", "cuda")
    assert said.code == 2
    assert "device cuda is asked for, but this machine has none; use --device cpu" in said.err
    assert not place.records()


def test_results_that_cannot_be_written(place: Any) -> None:
    (place.folder / "taken").write_text("a file\n")
    said = place.run("run", place.write(TINY), "--results", "taken/results")
    assert said.code == 2
    assert "taken/results" in said.err
    assert "Traceback" not in said.err


def test_records_of_a_newer_schema_are_refused_by_name(place: Any, make_record: Any) -> None:
    path = place.folder / "results/tiny/0123456789ab/00000000/a.jsonl"
    path.parent.mkdir(parents=True)
    before = make_record().line() + json.dumps({"v": 99, "key": "x"}).encode() + b"\n"
    path.write_bytes(before)
    for verb in ("report", "run"):
        said = place.run(verb, place.write(TINY))
        assert said.code == 2
        assert path.name in said.err
        assert "99" in said.err
    assert path.read_bytes() == before


def test_a_corrupted_line_is_named_and_the_others_count(place: Any, trained: Path) -> None:
    place.write(TINY)
    subprocess.run(["cp", "-r", str(trained / "results"), str(place.folder)], check=True)
    (shard,) = (place.folder / "results").glob("tiny/*/*/*.jsonl")
    shard.write_bytes(b'{"v": 1, "key": \n' + shard.read_bytes() + b'{"v": 1, "torn')
    said = place.run("report", "tiny.yaml")
    assert said.code == 0
    assert f"{shard.name}:1" in said.err.replace("\n", "")
    assert "n=2" in said.out
    again = place.run("run", "tiny.yaml")
    assert again.code == 0
    assert len(place.records()) == 2


def test_a_mixer_of_nans_is_recorded_as_diverged_and_the_others_train(place: Any) -> None:
    (place.folder / "broken.py").write_text(NAN)
    said = place.run("run", place.write(TINY + "plugins: [broken.py]\nsweep: {grid: {mixer: [broken, attention]}}\n"))
    assert said.code == 3
    assert "diverged" in said.out + said.err
    found = {(r.config["mixer"]["name"], r.seed): r.status for r in place.records()}
    assert found == {
        ("broken", 0): "diverged",
        ("broken", 1): "diverged",
        ("attention", 0): "ok",
        ("attention", 1): "ok",
    }


def report(place: Any, trained: Path, *words: str) -> str:
    said = place.run("report", str(trained / "tiny.yaml"), "--results", str(trained / "results"), *words)
    assert said.code == 0, said.err
    return said.out


def test_the_table_in_every_format(place: Any, trained: Path) -> None:
    text = report(place, trained)
    assert "mean ± sample std (ddof=1) over n=2 seeds" in text
    assert "| attention |" in report(place, trained, "--format", "md")
    assert r"\toprule" in report(place, trained, "--format", "latex")
    rows = list(csv.DictReader(io.StringIO(report(place, trained, "--format", "csv"))))
    assert {row["seed"] for row in rows} >= {"0", "1"}
    data = json.loads(report(place, trained, "--format", "json"))
    assert "attention" in json.dumps(data)


def test_a_published_table_beside_ours(place: Any, trained: Path) -> None:
    text = report(place, trained, "--against", "log-linear-mqar", "--format", "md")
    assert "2506.04761" in text
    said = place.run(
        "report", str(trained / "tiny.yaml"), "--results", str(trained / "results"), "--against", "log-linear"
    )
    assert said.code == 2
    assert "log-linear-mqar" in said.err


def test_write_keeps_the_table_beside_the_records(place: Any, trained: Path) -> None:
    report(place, trained, "--write")
    table = trained / "results/tiny/TABLE.md"
    assert "| attention |" in table.read_text()
    table.unlink()
    table.mkdir()
    words = str(trained / "tiny.yaml"), "--results", str(trained / "results")
    said = place.run("report", *words, "--write")
    table.rmdir()
    assert said.code == 2
    assert said.err == f"cannot write to {table}: Is a directory\n"


def test_plan_trains_nothing(place: Any) -> None:
    said = place.run("run", place.write(TINY), "--plan")
    assert said.code == 0
    assert "1 cells, 0 done; 2 runs to do" in said.out
    assert not (place.folder / "results").exists()


def test_show_says_where_each_value_comes_from_and_finds_records(place: Any, trained: Path) -> None:
    text = place.run("show", place.write(TINY), "train.lr=0.5").out
    assert "tiny.yaml:3:14" in text
    assert "default" in text
    assert "lr: 0.5" in text
    record = next((trained / "results").glob("tiny/*/*/*.jsonl")).read_text().splitlines()[0]
    key = json.loads(record)["key"]
    shown = json.loads(place.run("show", key[:12], "--results", str(trained / "results")).out)
    assert shown["key"] == key


def test_lists_and_schema(place: Any) -> None:
    mixers = [row["name"] for row in json.loads(place.run("list", "mixers", "--json").out)]
    assert {"attention", "linear_attention", "mamba2", "gated_deltanet"} <= set(mixers)
    assert (
        "in one layer."
        in {row["name"]: row["about"] for row in json.loads(place.run("list", "mixers", "--json").out)}["ahla"]
    )
    assert "mqar" in place.run("list", "tasks").out
    assert "quickstart" in place.run("list", "configs").out
    assert json.loads(place.run("schema").out)["$schema"].endswith("draft-07/schema#")


def test_bench_data_prints_the_ratio(place: Any) -> None:
    said = place.run("bench", "data", "--rows", "2000", "--out", "bench.jsonl")
    assert said.code == 0, said.err
    assert "ratio" in said.out
    assert json.loads((place.folder / "bench.jsonl").read_text())["ratio"] > 0


def test_what_must_be_quick_never_imports_torch(trained: Path) -> None:
    words = [["--help"], ["report", "tiny.yaml"], ["show", "tiny.yaml"], ["list", "configs"], ["list", "mixers"]]
    words.append(["report", str(Path(__file__).parents[2] / "results/bench/data.jsonl")])
    code = f"""
import contextlib, io, sys
from mixassay.runners import cli
for words in {words!r}:
    sys.argv = ["mixassay", *words]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        cli.main()
    print(words, sorted({{"torch", "scipy", "numpy"}} & set(sys.modules)))
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=trained, env=env, capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"{w} []" for w in words], done.stderr
