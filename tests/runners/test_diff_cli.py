"""`mixassay diff` on a repository of its own: real commits of the package, real runs that take seconds."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from mixassay.runners import diff, refs
from mixassay.runners.confirm import fresh_runs

ROOT = Path(__file__).parents[2]
SWEEP = """\
version: 1
name: small
plugins: [previous.py]
task: {name: previous, valid_examples: 64, test_examples: 256}
model: {n_layers: 1, d_model: 32}
train: {steps: 200, batch_size: 32, lr: 1e-2} # all of ten seeds end above 80, without decay at 50
sweep: {grid: {mixer: [{name: mamba2, d_state: 8, head_dim: 8, conv: 0}, linear_attention]}}
seeds: 0-4
run: {device: cpu, slots: 1}
"""
TASK = '''\
from dataclasses import dataclass
from typing import ClassVar

import torch

from mixassay.tasks import Rows, draw_rows, task


@task("previous")
@dataclass(frozen=True, kw_only=True)
class Previous:
    """At every position but the first, the token before it: a memory must know what came last."""

    version: ClassVar[int] = 1
    vocab_size: int = 4
    seq_len: int = 16

    def rows(self, index, *, seed, split):
        def draw(words):
            tokens = words % self.vocab_size
            positions = torch.arange(1, self.seq_len).expand(len(tokens), -1)
            return Rows(tokens, positions.contiguous(), tokens[:, :-1].contiguous())

        return draw_rows(draw, self.seq_len, index, seed=seed, split=split, stream=77)
'''
KEEPS = "return linear_attention(C, B, v, log_decay, scale=1.0,"
MAMBA2, LINEAR = "mamba2 d_state=8 head_dim=8 conv=0", "linear_attention"
FORGETS_NOTHING = "return linear_attention(C, B, v, None, scale=1.0,"


@dataclass
class Repository:
    folder: Path

    def git(self, *words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *who, *words], cwd=self.folder, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(self, message: str) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)

    def run(self, tag: str) -> None:
        """Commit what lies here, and train what that changes."""
        self.commit(tag)
        self.git("tag", tag)
        done = self.mixassay("run", "small.yaml")
        assert done.returncode == 0, done.stderr

    def mixassay(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """The command as this commit has it."""
        env = {**os.environ, "PYTHONPATH": str(self.folder / "src"), "COLUMNS": "200"}
        command = [sys.executable, "-P", "-m", "mixassay", *words]
        return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True)

    def diff(self, *words: str) -> tuple[int, dict[str, Any]]:
        done = self.mixassay("diff", *words, "--json")
        assert done.returncode in (0, 1), done.stderr
        return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """Two commits, both run: `good`, and `broken`: Mamba-2 without its decay, linear attention with a comment more."""
    folder = tmp_path_factory.mktemp("repository")
    for name in ("src", "tasks", "mixers", "kernels", "runners", "configs"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "previous.py").write_text(TASK)
    (folder / "small.yaml").write_text(SWEEP)
    (folder / ".gitignore").write_text("__pycache__/\n/results/\n")
    mamba2, linear = folder / "mixers/mamba2.py", folder / "mixers/linear_attention.py"
    assert mamba2.read_text().count(KEEPS) == 1
    made = Repository(folder)
    made.git("init", "-q", "-b", "main")
    made.run("good")
    linear.write_text(linear.read_text() + "# no change\n")
    mamba2.write_text(mamba2.read_text().replace(KEEPS, FORGETS_NOTHING))
    made.run("broken")
    return made


@pytest.mark.slow
def test_a_mixer_without_its_decay_is_named_and_nothing_else(repository: Repository) -> None:
    code, found = repository.diff("good")
    assert {mixer["name"]: mixer["verdict"] for mixer in found["mixers"]} == {MAMBA2: "regressed", LINEAR: "identical"}
    assert code == 1
    base, head = (next(c for c in found["cells"] if c["mixer"] == LINEAR)[side] for side in ("base", "head"))
    assert base["source"] != head["source"], "identical, though it was trained twice"
    told = repository.mixassay("diff", "good", "HEAD", "--format", "md")
    assert told.returncode == 1
    assert told.stdout.count("**regressed**") == 2, "the mixer's and its cell's"
    assert told.stderr == ""
    assert repository.mixassay("diff", "good", "--fail-on", "missing").returncode == 0


@pytest.mark.slow
def test_two_runs_of_the_same_code_are_identical_everywhere(repository: Repository) -> None:
    done = repository.mixassay("run", "small.yaml", "--results", "again", "--seeds", "0-1")
    assert done.returncode == 0, done.stderr
    head = repository.git("rev-parse", "broken")[:12]
    code, found = repository.diff(f"results/small/{head}", "again")
    assert {mixer["name"]: mixer["verdict"] for mixer in found["mixers"]} == {MAMBA2: "identical", LINEAR: "identical"}
    assert code == 0


@pytest.mark.slow
def test_suspects_are_trained_anew_by_the_code_of_both_sides(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository.folder)
    results = repository.folder / "results"
    base, head = (refs.resolve(tag, results) for tag in ("good", "broken"))
    found = diff.compare(base.records, head.records, diff.Rule())
    changes = [replace(change, verdict="suspect") for change in found.changes if change.mixer == LINEAR]
    fresh = fresh_runs(replace(found, changes=tuple(changes)), base, head, results)
    ((cell, sides),) = fresh.items()
    assert cell == changes[0].cell
    for side, tag in zip(sides, ("good", "broken"), strict=True):
        assert sorted(record.seed for record in side) == [5, 6, 7, 8, 9]
        assert {record.code.commit for record in side} == {repository.git("rev-parse", tag)}
        assert {record.suite for record in side} == {"small.confirm"}
    after = refs.resolve("broken", results)
    assert after.records == head.records, "fresh seeds are no part of the next diff"
    assert len(repository.git("worktree", "list").splitlines()) == 1


def test_mistakes_are_one_line(place: Any) -> None:
    subprocess.run(["git", "init", "-q"], check=True)
    (place.folder / "empty").mkdir()
    for words, message in (
        (["nowhere"], "nowhere: no such file or folder, and no commit of a git repository here"),
        (["empty", "empty"], "empty: no records of it; `mixassay run` there makes them"),
        (["empty", "empty", "--fail-on", "regresed"], 'unknown verdict "regresed". Did you mean "regressed"?'),
    ):
        said = place.run("diff", *words)
        assert said.code == 2
        assert message in said.err
        assert len(said.err.splitlines()) == 1


def test_files_of_benchmarks(place: Any) -> None:
    times = {"status": "ok", "ms": 1.0, "ms_p20": 0.99, "ms_p80": 1.01, "floor_ms": 0.5}
    slow = {**times, "ms": 1.25, "ms_p20": 1.24, "ms_p80": 1.26}
    env = {"id": "1", "class": "X", "device": "X", "cpu": "Y"}
    ours = {"bench": "kernels", "op": "gla", "T": 64, "implementation": "mixassay triton", "ours": True, "env": env}
    for name, found in (("a.jsonl", times), ("b.jsonl", slow)):
        (place.folder / name).write_text(json.dumps({**ours, "forward": found}) + "\n")
    said = place.run("diff", "a.jsonl", "b.jsonl")
    assert (said.code, said.err) == (1, "")
    assert "regressed" in said.out
    assert place.run("diff", "a.jsonl", "a.jsonl").code == 0


def test_nothing_imports_torch(place: Any) -> None:
    quickstart = str(ROOT / "docs/results/quickstart")
    code = f"""
import contextlib, io, sys
from mixassay.runners import cli
sys.argv = ["mixassay", "diff", {quickstart!r}, {quickstart!r}]
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    cli.main()
print(sorted({{"torch", "scipy.stats"}} & set(sys.modules)))
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
