"""What BASE and HEAD mean: records by the code of a commit, by folder and by file."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mixassay import provenance
from mixassay.errors import UserError
from mixassay.record import RunRecord
from mixassay.runners import refs
from mixassay.runners.store import Store
from mixassay.spec import Sections

Make = Callable[..., RunRecord]
MIXER = 'from mixassay.mixers import Mixer, mixer\n\n@mixer("ema")\nclass EMA(Mixer):\n    decay = {decay}\n'
RESULTS = Path("results")


def git(*words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *who, *words], check=True, capture_output=True, text=True).stdout.strip()


def source() -> str:
    """Of a run of the plug-in as it lies here now."""
    sections = Sections.model_validate_json(json.dumps(CONFIG))
    return provenance.source_of(sections, [Path("ema.py")])


CONFIG: dict[str, Any] = {"task": {"name": "mqar"}, "mixer": {"name": "ema"}, "model": {}, "train": {"steps": 1}}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_record: Make) -> Callable[..., RunRecord]:
    """A repository with a plug-in of two versions, `old` and HEAD, and a record of each."""
    monkeypatch.chdir(tmp_path)
    git("init", "-q", "-b", "main")

    def store(key: str, source: str, **code: Any) -> RunRecord:
        facts = {"commit": "none", "dirty": False, "patch": None, "source": source, "version": "0.1.0"} | code
        time = {"start": f"2026-01-01T00:00:{len(list(RESULTS.rglob('*.jsonl'))):02d}Z", "seconds": 1}
        record = make_record(key=key, config=CONFIG, code=facts, time=time)
        Store(RESULTS).append([record])
        return record

    for decay, name in ((0.9, "old"), (0.5, "new")):
        Path("ema.py").write_text(MIXER.format(decay=decay))
        Path("broken.py").write_text('no python, yet it says @mixer("ema")\n')
        git("add", "ema.py", "broken.py")
        git("commit", "-q", "-m", name)
        git("tag", name)
        store(name, source())
    return store


def keys(text: str, **more: Any) -> set[str]:
    return {record.key for record in refs.resolve(text, RESULTS, **more).records}


def test_a_ref_is_what_its_code_made_wherever_that_ran(store: Make) -> None:
    assert keys("old") == {"old"}
    assert keys("HEAD") == {"new"}
    assert keys(git("rev-parse", "old")) == {"old"}
    git("commit", "-q", "--allow-empty", "-m", "nothing")
    assert keys("HEAD") == {"new"}, "a commit that changes nothing has its parent's records"
    git("mv", "ema.py", "moved.py")
    git("commit", "-q", "-m", "moved")
    assert keys("HEAD") == set(), "a plug-in of another name is other code"
    assert keys("old") == {"old"}


def test_the_commits_own_name_counts_where_no_source_agrees(store: Make) -> None:
    store("by name", "hashed in another way", commit=git("rev-parse", "old"))
    assert keys("old") == {"old"}, "what agrees in source is surer"
    for path in RESULTS.rglob("*.jsonl"):
        if "by name" not in path.read_text():
            path.unlink()
    assert keys("old") == {"by name"}


def test_a_package_that_cannot_say_what_its_code_is_called_is_told(store: Make) -> None:
    store("by name", source(), commit=git("rev-parse", "old"))
    package = Path("src/mixassay")
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")  # long before there were records
    git("add", "src")
    git("commit", "-q", "-m", "another package")
    assert keys("old") == {"old"}
    found = refs.resolve("HEAD", RESULTS)
    assert found.records == []
    (warning,) = found.warnings
    assert warning.startswith("HEAD: its package does not say what its code is called")


def test_records_of_uncommitted_code_count_only_when_asked_for(store: Make) -> None:
    store("dirty", source(), dirty=True, patch="0123456789")
    found = refs.resolve("HEAD", RESULTS)
    assert {record.key for record in found.records} == {"new"}
    assert found.warnings == ["HEAD: 1 record(s) of uncommitted code left out; --allow-dirty counts them"]
    assert keys("HEAD", dirty=True) == {"new", "dirty"}
    Path("ema.py").write_text(MIXER.format(decay=0.1))
    store("edited", source())
    assert {record.key for record in refs.working_tree(RESULTS).records} == {"edited"}
    assert keys("HEAD") == {"new"}


def test_a_folder_or_a_file_is_what_is_in_it_and_of_each_cell_the_newest_code(store: Make) -> None:
    found = refs.resolve("results", RESULTS)
    assert ({record.key for record in found.records}, found.place) == ({"new"}, None)
    assert found.warnings == ["results has 1 cell(s) by more than one version of the code: the newest counts"]
    first, second = sorted(RESULTS.rglob("*.jsonl"), key=lambda path: path.read_text(), reverse=True)
    assert keys(str(first)) | keys(str(second)) == {"old", "new"}
    assert len(keys(str(first))) == 1
    assert keys("results", suite="another") == set()


def test_fresh_runs_of_confirmations_are_not_counted_again(store: Make, make_record: Make) -> None:
    Store(RESULTS).append(
        [make_record(key="fresh", suite="demo.confirm", config=CONFIG, code={**CODE, "source": source()})]
    )
    assert keys("HEAD") == {"new"}
    assert "fresh" not in keys("results")


CODE = {"commit": "none", "dirty": False, "patch": None, "version": "0.1.0"}


def test_benchmarks_are_told_from_runs(store: Make) -> None:
    env = {"id": "1", "class": "cpu, torch 2.13"}
    lines = [
        {"bench": "kernels", "schema": 1, "env": env, "code": {**CODE, "commit": git("rev-parse", commit)}}
        for commit in ("old", "new")
    ]
    path = RESULTS / "kernels/cpu.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert refs.resolve("old", RESULTS).benches == lines[:1]
    (RESULTS / "kernels/other.jsonl").write_text('{"audit": "of another kind"}\n')
    both = refs.resolve(str(path.parent), RESULTS)
    assert (both.benches, both.records, both.warnings) == (lines, [], [])


def test_what_names_nothing_or_two_things(store: Make) -> None:
    with pytest.raises(UserError, match="nowhere: no such file or folder, and no commit"):
        refs.resolve("nowhere", RESULTS)
    Path("old").mkdir()
    with pytest.raises(UserError, match="old is a git ref and a path"):
        refs.resolve("old", RESULTS)
    assert keys("./old") == set()
    assert keys("refs/tags/old") == {"old"}
