"""`mixassay eval` with the network off: RULER, LongBench, retrieval and common sense by tiny models; what is stored,
reported and compared; what is refused."""

import gzip
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from mixassay.runners.eval import canary, longbench, longbench_v2, ruler, table
from mixassay.runners.eval import kept as keeping
from mixassay.runners.eval.question import Answer
from mixassay.runners.store import Store
from mixassay.tokens import Bytes

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.usefixtures("offline")

LONGBENCH = Path(os.environ.get("MIXASSAY_DATA") or Path(__file__).parents[4] / "shared/data")


def sides(place: Any, suite: str) -> list[dict[str, Any]]:
    """The lines of answers of a suite's only record."""
    (record,) = Store(place.folder / "results").read(suite).records
    assert record.samples is not None
    data = gzip.decompress((place.folder / "results" / suite / "answers" / f"{record.key}.jsonl.gz").read_bytes())
    assert hashlib.sha256(data).hexdigest() == record.samples.answers
    return [json.loads(line) for line in data.splitlines()]


def test_all_of_ruler(place: Any, kept: Any, data: Path) -> None:
    said = place.run(
        "eval", "--model", f"run:{kept('mamba2')}", "--suite", "ruler", "--lengths", "2K", "--limit", "1",
        "--data", str(data), "--essay", "on_liberty", "--json",
    )  # fmt: skip
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert [one["task"] for one in found] == list(ruler.TASKS)
    assert {(one["length"], one["seed"], one["samples"]) for one in found} == {(2048, 0, 1)}
    assert "canaries: a copyist scored all that budgets allow, noise scored 0, in 13 set(s)" in said.err


def test_records_report_and_diff(place: Any, kept: Any) -> None:
    words = ["--suite", "niah", "--tasks", "niah_multikey_1,niah_multivalue", "--lengths", "1024", "--limit", "2"]
    for seed in (0, 1):
        said = place.run(
            "eval", "--model", f"run:{kept('mamba2', seed)}", *words, "--seeds", "1,2", "--engine", "direct"
        )
        assert said.code == 0, said.err
    records = Store(place.folder / "results").read("niah").records
    assert sorted((r.config["task"]["name"], r.seed) for r in records) == [
        ("niah_multikey_1", 0), ("niah_multikey_1", 1), ("niah_multivalue", 0), ("niah_multivalue", 1),
    ]  # fmt: skip
    for record in records:
        assert record.config["task"]["samples"] == 4, "of two data seeds"
        assert record.config["task"]["data_seeds"] == [1, 2]
        assert record.data.startswith("ruler-ours/")
        assert record.state_bytes
        assert ("test/wrong_needle" in record.metrics) == (record.config["task"]["name"] == "niah_multikey_1")
        assert record.samples is not None
        per_sample = 4 if record.config["task"]["name"] == "niah_multivalue" else 1
        assert sum(cell.scored for cell in record.eval) == 4 * per_sample
        prompts = place.folder / "results/niah" / keeping.PROMPTS / f"{record.samples.prompts[:24]}.jsonl.gz"
        texts = [json.loads(line) for line in gzip.decompress(prompts.read_bytes()).splitlines()]
        answers = place.folder / "results/niah" / keeping.ANSWERS / f"{record.key}.jsonl.gz"
        lines = [json.loads(line) for line in gzip.decompress(answers.read_bytes()).splitlines()]
        assert [line["prompt_sha256"] for line in lines] == [hashlib.sha256(t.encode()).hexdigest() for t in texts]
    again = place.run("eval", "--model", f"run:{kept('mamba2')}", *words, "--seeds", "1,2", "--engine", "lm-eval")
    assert again.err.count("stored before") == 2, "both engines give the same numbers, so none is asked again"
    said = place.run("report", "results/niah")
    assert re.search(r"niah_multikey_1 +mamba2 +0\.0 ± 0\.0", said.out)
    assert re.search(r"mean of 2 +mamba2 +0\.0 ± 0\.0", said.out)
    said = place.run("report", "results/niah", "--only", "mixer=mamba2,task.name=niah_multikey_1", "--format", "md")
    assert "| niah_multikey_1 |" in said.out
    assert "multivalue" not in said.out
    said = place.run("report", "results/niah", "--only", "task.name=niah_multikye_1")
    assert said.code == 2
    assert "none has task.name=niah_multikye_1. Did you mean" in said.err
    said = place.run("report", "results/niah", "--only", "task.tokens=77")
    assert 'no evaluation has a field "task.tokens"' in said.err
    said = place.run("diff", "results/niah", "results/niah", "--allow-dirty", "--all")
    assert said.code == 0, said.err
    assert "identical" in said.out


def test_a_heatmap_of_depth_by_length(place: Any, kept: Any) -> None:
    pytest.importorskip("matplotlib")
    words = ["--suite", "niah", "--tasks", "niah_single_1", "--lengths", "768,1K", "--limit", "3", "--engine", "direct"]
    place.run("eval", "--model", f"run:{kept('linear_attention')}", *words)
    said = place.run("report", "results/niah", "--plot", "depth.svg", "--format", "csv")
    assert said.code == 0, said.err
    assert (place.folder / "depth.svg").stat().st_size > 1000
    figure = table.heatmap(table.collect(Store(place.folder / "results").read("niah").records))
    (panel,) = figure.panels
    assert panel.columns == (768, 1024)  # type: ignore[union-attr]
    for length in panel.columns:  # type: ignore[union-attr]
        counted = sum(shade.samples for at, shade in panel.shades.items() if at[0] == length)  # type: ignore[union-attr]
        assert counted == 3


def test_heatmaps_of_a_task_stand_side_by_side(place: Any, kept: Any) -> None:
    """A model that was not asked has an empty map, so that every line has the models in the same places."""
    words = ["--suite", "niah", "--lengths", "768", "--limit", "1", "--engine", "direct", "--tasks"]
    place.run("eval", "--model", f"run:{kept('linear_attention')}", *words, "niah_single_1,niah_single_2")
    place.run("eval", "--model", f"run:{kept('mamba2')}", *words, "niah_single_1")
    figure = table.heatmap(table.collect(Store(place.folder / "results").read("niah").records))
    assert figure.across == 2
    assert [panel.title for panel in figure.panels] == [
        f"{task}, {model}" for task in ("niah_single_1", "niah_single_2") for model in ("linear_attention", "mamba2")
    ]
    counted = [sum(shade.samples or 0 for shade in panel.shades.values()) for panel in figure.panels]  # type: ignore[union-attr]
    assert counted == [1, 1, 1, 0]


def test_longbench(place: Any, kept: Any) -> None:
    """Two sets of the local samples: read whole by a recurrent model, cut in the middle for one of 600 tokens."""
    pytest.importorskip("datasets")
    if not LONGBENCH.is_dir():
        pytest.skip(f"no LongBench samples at {LONGBENCH}; set MIXASSAY_DATA")
    words = ["--suite", "longbench", "--tasks", "hotpotqa,passage_count", "--limit", "1", "--data", str(LONGBENCH)]
    run = f"run:{kept('linear_attention')}"
    said = place.run("eval", "--model", run, *words, "--json")
    assert said.code == 0, said.err
    whole = json.loads(said.out)
    assert {(one["cut_prompts"], one["prompt_tokens"] > 10_000) for one in whole} == {(0.0, True)}
    said = place.run(
        "eval", "--model", f"run:{kept('linear_attention')}", *words, "--max-length", "600", "--name", "cut"
    )
    assert said.code == 0, said.err
    assert "Prompts that were cut to fit: hotpotqa 100 %, passage_count 100 %" in said.out
    cut = Store(place.folder / "results").read("cut").records
    assert all(0.9 < (r.metrics["test/cut_tokens"] or 0) < 1 for r in cut)
    assert all((r.metrics["test/prompt_tokens"] or 999) <= 600 - 32 for r in cut)


def test_retrieval(place: Any, kept: Any, data: Path) -> None:
    (data / "retrieval").mkdir()
    (data / "retrieval/swde.jsonl").write_text('{"text": "Name: Anna. The name is ", "value": "Anna"}\n')
    words = ["--suite", "retrieval", "--data", str(data)]
    said = place.run("eval", "--model", f"run:{kept('mamba2')}", *words)
    assert said.code == 0, said.err
    assert re.search(
        r"left out: fda: no .*retrieval/fda\.jsonl: JSON lines, rows with the fields text and value", said.err
    )
    (line,) = sides(place, "retrieval")
    assert (line["answers"], line["score"]) == (["Anna"], 0.0)
    assert len(line["answer"].encode()) <= 48 * 3


def test_retrieval_at_lengths(place: Any, kept: Any, data: Path) -> None:
    """A recurrent model, too: the table says what share was cut, and what share still holds the answer."""
    (data / "retrieval").mkdir()
    row = {"context": f"{'Nothing is here. ' * 30}Anna is here.", "question": "Who is here?", "answers": ["Anna"]}
    (data / "retrieval/nq.jsonl").write_text(json.dumps(row) + "\n")
    (data / "retrieval/drop.jsonl").write_text(json.dumps(row) + "\n")
    words = ["--suite", "retrieval", "--data", str(data), "--lengths", "60,256,1K", "--tasks", "nq,drop"]
    said = place.run("eval", "--model", f"run:{kept('mamba2')}", *words)
    assert said.code == 0, said.err
    assert "left out: retrieval: nq at length 60: 'Who is here?' and 48 tokens for the answer leave no room" in said.err
    assert re.search(r"task +model +256 +1,024", said.out)
    shares = "nq@256 {} %, nq@1024 {} %, drop@256 {} %, drop@1024 {} %."
    assert "Prompts that were cut to fit: " + shares.format(100, 0, 100, 0) in said.out
    assert "Prompts that hold an answer: " + shares.format(100, 100, 0, 100) in said.out


def test_longbench_e_in_ranges_of_length(place: Any, kept: Any, data: Path) -> None:
    (data / "longbench").mkdir()
    row = {"input": "Who?", "context": "Anna.", "answers": ["Anna"], "dataset": "qasper_e", "all_classes": None}
    lengths = (9000, 5000, 10, 11)
    (data / "longbench/qasper_e.jsonl").write_text("".join(json.dumps({**row, "length": n}) + "\n" for n in lengths))
    words = ["--suite", "longbench-e", "--data", str(data), "--engine", "direct"]
    said = place.run("eval", "--model", f"run:{kept('mamba2')}", *words)
    assert said.code == 0, said.err
    assert said.err.count("left out: ") == 12
    assert re.search(r"task +model +score +0-4k +4-8k +8k\+", said.out)
    (record,) = Store(place.folder / "results").read("longbench-e").records
    assert record.config["task"]["name"] == "qasper_e"
    assert [(cell.cell, cell.rows) for cell in record.eval] == [
        ({"length": "0-4k"}, 2), ({"length": "4-8k"}, 1), ({"length": "8k+"}, 1),
    ]  # fmt: skip
    (told,) = json.loads(place.run("eval", "--model", f"run:{kept('mamba2')}", *words, "--json").out)
    assert told["length=8k+"] == 0.0


def test_longbench_v2(place: Any, kept: Any, data: Path) -> None:
    """Cut in the middle for a model of 600 tokens; a model that names no choice is wrong, or guesses."""
    (data / "longbench-v2").mkdir()
    row = {
        "_id": "1", "domain": "Code", "difficulty": "hard", "length": "long", "question": "Which?", "answer": "C",
        "context": "Nothing is here. " * 60, **{f"choice_{letter}": letter for letter in "ABCD"},
    }  # fmt: skip
    (data / "longbench-v2/data.json").write_text(json.dumps([row, {**row, "difficulty": "easy"}]))
    words = ["--suite", "longbench-v2", "--data", str(data), "--max-length", "600"]
    said = place.run("eval", "--model", f"run:{kept('mamba2')}", *words)
    assert said.code == 0, said.err
    assert re.search(r"task +model +score +easy +hard +long", said.out)
    assert "Prompts that were cut to fit: longbench_v2 100 %." in said.out
    assert "Answers that name no choice, and are wrong: longbench_v2 100 %." in said.out
    (record,) = Store(place.folder / "results").read("longbench-v2").records
    assert (record.metrics["test/accuracy"], record.metrics["test/compensated"]) == (0.0, 0.25)
    assert [cell.cell for cell in record.eval] == [
        {"difficulty": "easy"}, {"difficulty": "hard"}, {"domain": "Code"}, {"length": "long"},
    ]  # fmt: skip
    assert (record.metrics["test/prompt_tokens"] or 999) <= 600 - 128


class FirstAToken(Bytes):
    """Bytes whose file asks for a token before every prompt."""

    special = 1


def test_longbench_counts_the_tokens_that_stand_around_a_prompt(data: Path) -> None:
    folder, long = data / "longbench", "Nothing is here. " * 60
    folder.mkdir()
    row = {"input": "Who?", "context": long, "answers": ["Anna"], "dataset": "qasper", "all_classes": None, "length": 9}
    (folder / "qasper.jsonl").write_text(json.dumps(row))
    row = {"question": "Who?", "context": long, "answer": "C", "difficulty": "hard", "length": "long", "domain": "Code"}
    (folder / "longbench_v2.jsonl").write_text(json.dumps(row | {f"choice_{letter}": letter for letter in "ABCD"}))
    for longest in (None, 777):
        for asked in (
            longbench.make("qasper", folder, None, FirstAToken(), longest),
            longbench_v2.make(folder, None, FirstAToken(), longest),
        ):
            (question,) = asked.questions
            assert question.tokens == len(question.prompt) + 1
            assert question.cut == (longest is not None)
            assert longest is None or question.tokens + question.new_tokens in (776, 777), "halves are even"
            assert canary.sing(asked, FirstAToken(), longest, copied).best == 1.0


def copied(script: Any, asked: Any) -> list[Answer]:
    texts = [canary.written(q, FirstAToken(), script(q)) for q in asked.questions]
    return [Answer(text, asked.score(q, text)) for q, text in zip(asked.questions, texts, strict=True)]


def test_the_hub_without_a_network(place: Any, kept: Any) -> None:
    words = ["--suite", "longbench", "--tasks", "qasper", "--data"]
    for name, where in (("hub", "Xnhyacinth/LongBench"), ("some/mirror", "some/mirror")):
        said = place.run("eval", "--model", f"run:{kept('mamba2')}", *words, name)
        assert said.code == 2
        assert f"qasper of LongBench cannot be read from {where}: " in said.err
        assert "a folder with qasper.jsonl needs no network" in said.err


def test_common_sense_by_lm_eval_from_local_files(place: Any, kept: Any, data: Path) -> None:
    folder = data / "commonsense"
    folder.mkdir()
    rows = {
        "piqa": {"goal": "open a jar", "sol1": "turn the lid", "sol2": "eat the lid", "label": 0},
        "winogrande": {"sentence": "A cat saw _ run away.", "option1": "mice", "option2": "trees", "answer": "1"},
        "commonsense_qa": {
            "question": "Where is milk?", "answerKey": "B",
            "choices": {"label": list("ABCDE"), "text": ["sky", "fridge", "sun", "moon", "tree"]},
        },
        "lambada_openai": {"text": "she said yes and he said no"},
        "hellaswag": {
            "ctx_a": "A man", "ctx_b": "he", "activity_label": "Cooking", "endings": ["cooks", "flies"], "label": "0",
        },
    }  # fmt: skip
    for name, row in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(2)))
    said = place.run(
        "eval", "--model", f"run:{kept('mamba2')}", "--suite", "commonsense", "--data", str(data), "--json"
    )
    assert said.code == 0, said.err
    assert "left out: boolq: no " in said.err
    found = {one["task"]: one for one in json.loads(said.out)}
    assert found.keys() == rows.keys()
    assert found["lambada_openai"]["perplexity"] > 1
    assert found["piqa"]["accuracy"] == found["piqa"]["acc"]
    assert found["hellaswag"]["accuracy"] == found["hellaswag"]["acc_norm"]


REFUSED = {
    "--model should be run:KEY, runs:FILE or hf:PATH, got mamba2": ["--model", "mamba2", "--suite", "niah"],
    "no weights of such a run under": ["--model", "run:abcd", "--suite", "niah"],
    'suite niah has no task "vt"': ["--model", "run:x", "--suite", "niah", "--tasks", "vt"],
    "--lengths are for ruler, niah, retrieval": ["--model", "run:x", "--suite", "longbench", "--lengths", "1K"],
    "--lengths: 20000K is more than 16,777,216 tokens": ["--model", "run:x", "--suite", "niah", "--lengths", "20000K"],
    "--lengths: a prompt of 0 tokens asks nothing": ["--model", "run:x", "--suite", "niah", "--lengths", "0"],
    "--essay no.txt: there is no such file": ["--model", "run:x", "--suite", "niah", "--essay", "no.txt"],
    "device should be auto, cpu, cuda or cuda:1, got cudda": [
        "--model", "run:x", "--suite", "niah", "--device", "cudda",
    ],
    "device cuda:99 is asked for, but this machine has": [
        "--model", "run:x", "--suite", "niah", "--device", "cuda:99",
    ],
    "--lengths: 4x is no number of tokens": ["--model", "run:x", "--suite", "niah", "--lengths", "4x"],
    "qa_1: put one file of questions in SQuAD's layout into --data DIR with DIR/squad/, found 0": [
        "--model", "run:x", "--suite", "ruler", "--tasks", "qa_1",
    ],
    "qasper: no DIR/longbench/qasper.jsonl, and give --data DIR: JSON lines, rows as THUDM/LongBench": [
        "--model", "run:x", "--suite", "longbench", "--tasks", "qasper",
    ],
    "piqa: no DIR/commonsense/piqa.jsonl, and give --data DIR: JSON lines, the rows of baber/piqa, validation": [
        "--model", "run:x", "--suite", "commonsense", "--tasks", "piqa",
    ],
    "trec_e: no DIR/longbench/trec_e.jsonl, and give --data DIR: JSON lines, rows as THUDM/LongBench": [
        "--model", "run:x", "--suite", "longbench-e", "--tasks", "trec_e",
    ],
    "longbench_v2: no DIR/longbench-v2/longbench_v2.jsonl, and give --data DIR: JSON lines, rows as THUDM": [
        "--model", "run:x", "--suite", "longbench-v2",
    ],
    "--data nowhere: no such folder, hub, or OWNER/NAME on it": [
        "--model", "run:x", "--suite", "longbench", "--data", "nowhere",
    ],
    "--data hub: no such folder; from the hub come only the suites longbench, longbench-e, longbench-v2": [
        "--model", "run:x", "--suite", "ruler", "--data", "hub",
    ],
    "hf:nowhere: no nowhere/config.json": ["--model", "hf:nowhere", "--suite", "niah"],
}  # fmt: skip


def test_what_is_named_twice_counts_once(place: Any, kept: Any) -> None:
    words = ["eval", "--model", f"run:{kept('mamba2')}", "--suite", "niah", "--limit", "2", "--json"]
    said = place.run(*words, "--tasks", "niah_single_1,niah_single_1", "--lengths", "2K,2048", "--seeds", "42,042")
    assert said.code == 0, said.err
    assert [one["samples"] for one in json.loads(said.out)] == [2]


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(place: Any, message: str) -> None:
    said = place.run("eval", *REFUSED[message])
    assert said.code == 2
    assert message in said.err


def test_a_dead_canary_ends_the_command_before_a_number(place: Any, kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ruler.scores, "score", lambda *_, **__: 1.0)
    words = ["--suite", "niah", "--tasks", "niah_single_1", "--lengths", "1K", "--limit", "1", "--engine", "direct"]
    said = place.run("eval", "--model", f"run:{kept('mamba2')}", *words)
    assert said.code == 4
    assert "an answer of nothing but § scores 1, not 0" in said.err
    assert said.out == ""
    assert not list((place.folder / "results/niah").rglob("*.jsonl"))
