"""What an evaluation leaves: ordinary records, and beside them every prompt and every answer.

    results/<suite>/<commit>/<environment>/*.jsonl    a record for each model, task, length and seed
    results/<suite>/answers/<key>.jsonl.gz            sample by sample: answer, score, hash of the prompt, tokens
    results/<suite>/.prompts/<hash>.jsonl.gz          the prompts themselves, once for all models that read them

The seed of a record is what varies: the training seed of one of our runs, of which the samples of all data seeds count
together; of a model that there is once, the seed of the data.
"""

import gzip
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from mixassay import provenance
from mixassay.record import Code, EvalCell, Number, RunRecord, Samples, Time
from mixassay.runners.eval.question import Answer, Question, Set, hashed
from mixassay.runners.eval.ruler import by_depth
from mixassay.runners.recorder import ago
from mixassay.spec import digest
from mixassay.tasks.ruler.table import TASKS

PROMPTS, ANSWERS = ".prompts", "answers"


@dataclass(frozen=True)
class Subject:
    """The model of a record. `sections` are mixer, model and train of its configuration; `seed` of its training, None
    for a model that there is once."""

    sections: dict[str, Any]
    seed: int | None
    params: int
    weights: str | None = None
    source: tuple[str, ...] = ()  # modules whose code it depends on
    state_bytes: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Label:
    """What a record is of, known before anything is asked."""

    key: str
    cell: str
    seed: int
    config: dict[str, Any]
    data: str


@dataclass(frozen=True)
class Asked:
    """Sets of one task and length, of one data seed or of several, with a model's answers. `best`: of the copyist;
    `more`: further metrics, by name."""

    sets: tuple[Set, ...]
    answers: tuple[tuple[Answer, ...], ...]
    best: tuple[float, ...]
    seconds: float
    more: Mapping[str, float] = field(default_factory=dict)

    @property
    def pairs(self) -> list[tuple[Question, Answer]]:
        return [
            pair
            for asked, given in zip(self.sets, self.answers, strict=True)
            for pair in zip(asked.questions, given, strict=True)
        ]


def label(sets: Sequence[Set], subject: Subject, options: dict[str, Any], code: Code, env: dict[str, Any]) -> Label:
    """`options` are settings of the evaluation that can move numbers (precision, engine)."""
    first, seeds = sets[0], [one.seed for one in sets if one.seed is not None]
    recipe = {name: value for name, value in first.recipe.items() if name not in ("seed", "task", "length")}
    samples = sum(len(one.questions) for one in sets)
    task = {"name": first.task, "length": first.length, "samples": samples, **recipe, **options}
    if subject.seed is not None and seeds:
        task["data_seeds"] = seeds
    seed = subject.seed if subject.seed is not None else seeds[0] if seeds else 0
    config = {"task": task, **subject.sections}
    cell = digest(config)
    key = digest([cell, seed, code.source, first.data, str(env["class"]), subject.weights], length=24)
    return Label(key, cell, seed, config, first.data)


def record(of: Label, asked: Asked, subject: Subject, suite: str, code: Code, env: dict[str, Any]) -> RunRecord:
    first, pairs = asked.sets[0], asked.pairs
    axes = {"mixer": subject.sections["mixer"], "task.name": first.task}
    return RunRecord(
        key=of.key,
        cell=of.cell,
        suite=suite,
        seed=of.seed,
        role="report",
        status="ok",
        axes=axes if first.length is None else {**axes, "task.length": first.length},
        tuned={},
        config=of.config,
        metrics=metrics(asked),
        eval=cells(asked),
        state_bytes={str(T): size for T, size in subject.state_bytes.items()},
        params=subject.params,
        weights=subject.weights,
        samples=Samples(
            prompts=hashed(question.prompt for question, _ in pairs),
            answers=hashlib.sha256(answer_lines(pairs)).hexdigest(),
        ),
        code=code,
        env=env,
        data=of.data,
        time=Time(start=ago(asked.seconds), seconds=asked.seconds),
    )


def metrics(asked: Asked) -> dict[str, Number]:
    """The mean score, its standard error over samples, what the budget allows at best, tokens of prompts, and what
    the sets measure besides."""
    pairs = asked.pairs
    scores = [answer.score for _, answer in pairs]
    questions = [question for question, _ in pairs]
    found: dict[str, Number] = {
        "test/accuracy": fmean(scores),
        "test/stderr": stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else None,
        "test/best_possible": fmean(asked.best),
    }
    if whole := sum(question.whole for question in questions):  # tasks of likelihoods do not tell
        found["test/prompt_tokens"] = fmean(question.tokens for question in questions)
        found["test/cut_prompts"] = fmean(question.cut for question in questions)
        found["test/cut_tokens"] = 1 - sum(question.tokens for question in questions) / whole
    for name, measure in asked.sets[0].measures.items():
        found[f"test/{name}"] = fmean(measure(question, answer.text) for question, answer in pairs)
    return found | {f"test/{name}": value for name, value in asked.more.items()}


def cells(asked: Asked) -> tuple[EvalCell, ...]:
    """By tenths of depth where answers have a place, by groups where questions have some, else all samples in one."""
    found: dict[tuple[str, Any], list[float]] = {}
    for one, given in zip(asked.sets, asked.answers, strict=True):
        if one.task in TASKS:
            for depth, values in by_depth(one, [answer.text for answer in given]).items():
                found.setdefault(("depth", depth), []).extend(values)
    for question, answer in asked.pairs:
        for group in question.groups.items():
            found.setdefault(group, []).append(answer.score)
    if not found:
        return (cell({}, [answer.score for _, answer in asked.pairs]),)
    return tuple(cell({kind: of}, values) for (kind, of), values in sorted(found.items()))


def cell(of: dict[str, Any], scores: Sequence[float]) -> EvalCell:
    return EvalCell(split="test", cell=of, rows=len(scores), scored=len(scores), accuracy=fmean(scores), loss=None)


def answer_lines(pairs: Sequence[tuple[Question, Answer]]) -> bytes:
    """A line of JSON for each sample."""
    lines = [
        {
            "prompt_sha256": hashlib.sha256(question.prompt.encode()).hexdigest(),
            "prompt_tokens": question.tokens,
            "whole_tokens": question.whole,
            "depths": question.depths,
            "answers": question.answers,
            "answer": answer.text,
            "score": answer.score,
        }
        for question, answer in pairs
    ]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()


def keep(record: RunRecord, asked: Asked, results: Path) -> None:
    """Prompts and answers, before the record that names them is written."""
    assert record.samples is not None
    folder = results / record.suite
    write(folder / ANSWERS / f"{record.key}.jsonl.gz", answer_lines(asked.pairs))
    prompts = folder / PROMPTS / f"{record.samples.prompts[:24]}.jsonl.gz"
    if not prompts.is_file():
        lines = (json.dumps(question.prompt, ensure_ascii=False) + "\n" for question, _ in asked.pairs)
        write(prompts, "".join(lines).encode())
        (folder / PROMPTS / ".gitignore").write_text("*\n")


def write(path: Path, data: bytes) -> None:
    """Whole or not at all; the same bytes for the same data."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(gzip.compress(data, mtime=0))
    partial.replace(path)


def code_of(subject: Subject) -> Code:
    return provenance.code(provenance.source_hash(["mixassay.runners.eval.session", *subject.source]))
