"""`mixassay audit-bias` from the command line: what it prints and keeps, and how it says what is wrong with a file."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mixassay.errors import UserError
from mixassay.runners.audit import records
from mixassay.runners.audit.config import Audit, Dla
from mixassay.runners.cli.files import shipped

FILE = """\
version: 1
name: small
title: A small audit
stream: {tokens: 64, segments: 4, d_key: 6, d_value: 6}
streams:
  quiet: {sigma: 0.1}
  random: {sigma: null}
capacity: 5
policies: [single, fixed, {name: dla, tau: tuned, rule: ward}, optimal]
seeds: 0-2
tuning: {seeds: [0], taus: [0.4, 0.8]}
"""


def test_the_table_says_what_it_shows(place: Any) -> None:
    said = place.run("audit-bias", place.write(FILE, "small.yaml"))
    assert said.code == 0, said.err
    assert "A small audit" in said.out
    for word in ("quiet", "random", "single", "fixed", "dla tau tuned ward", "optimal"):
        assert word in said.out
    words = " ".join(said.out.split())
    assert "mean ± sample std (ddof=1) over n=3 seeds (0-2), each the mean over 6 prefixes of 64 tokens" in words
    assert float(re.search(r"Largest bias / B of all: ([\d.]+)\.\s", said.out)[1]) <= 1  # type: ignore[index]
    assert not (place.folder / "results").exists(), "nothing is kept unless asked for"


def test_csv_and_json_hold_every_number(place: Any) -> None:
    place.write(FILE, "small.yaml")
    numbers = json.loads(place.run("audit-bias", "small.yaml", "--format", "json").out)["numbers"]
    lines = list(csv.DictReader(io.StringIO(place.run("audit-bias", "small.yaml", "--format", "csv").out)))
    assert len(lines) == 3 * len(numbers)
    bound = next(x for x in numbers if (x["stream"], x["policy"], x["metric"]) == ("quiet", "single", "bound"))
    values = list(bound["values"].values())
    assert bound["mean"] == pytest.approx(sum(values) / 3)
    assert bound["std"] == pytest.approx((sum((v - bound["mean"]) ** 2 for v in values) / 2) ** 0.5), "ddof=1"
    assert (bound["n"], bound["capacity"], bound["state_bytes"]) == (3, 5, 4 * 36)
    same = [x for x in lines if (x["stream"], x["policy"], x["metric"]) == ("quiet", "single", "bound")]
    assert [float(x["value"]) for x in same] == values
    assert [x["seed"] for x in same] == ["0", "1", "2"]
    for kind in ("md", "latex"):
        assert "±" in (text := place.run("audit-bias", "small.yaml", "--format", kind).out) or r"$\pm$" in text


def test_records_and_table_are_kept_when_asked_for(place: Any) -> None:
    place.write(FILE, "small.yaml")
    said = place.run("audit-bias", "small.yaml", "--write", "--plot", "small.svg", "--seeds", "0-1", "capacity=4")
    assert said.code == 0, said.err
    folder = place.folder / "results/audit/small"
    kept = records.read(folder / "records.jsonl")
    assert [(r.stream, r.policy) for r in kept][:4] == [
        ("quiet", p) for p in ("single", "fixed", "dla tau tuned ward", "optimal")
    ]
    assert len(kept) == 8
    assert {(r.v, r.seeds, r.config["capacity"], r.audit) for r in kept} == {(1, (0, 1), 4, "small")}
    assert kept[0].config["stream"]["sigma"] == 0.1
    assert kept[0].code.commit
    assert kept[0].env["torch"]
    assert (folder / "TABLE.md").read_text().startswith("**A small audit**\n")
    assert "<svg" in (place.folder / "small.svg").read_text()
    with open(folder / "records.jsonl", "a") as file:
        file.write('{"v": 2}\n')
    with pytest.raises(UserError, match=r"records.jsonl:9: not a record of an audit \(schema 1\)"):
        records.read(folder / "records.jsonl")


def test_a_picture_that_cannot_be_made_is_said_before_anything_runs(place: Any) -> None:
    place.write(FILE, "small.yaml")
    said = place.run("audit-bias", "small.yaml", "--plot", "small.gif")
    assert (said.code, said.err) == (2, "--plot: small.gif should end in .svg, .png, .pdf\n")


WRONG = [
    ("name: small", "name: a/b", "2:7: name should be letters, digits, dot, dash and underscore, got a/b"),
    ("version: 1", "version: 2", "1:10: version should be 1"),
    ("capacity: 5", "capasity: 5", '8:1: unknown key "capasity". Did you mean "capacity"?'),
    ("capacity: 5", "capacity: 1", "8:11: capacity should be greater than or equal to 2, got 1"),
    ("segments: 4", "segmens: 4", '4:22: unknown key "streams.quiet.segmens". Did you mean "segments"?'),
    ("segments: 4", "segments: 40", "4:32: streams.quiet: segmented_stream: segments=40 needs tokens from 160"),
    ("sigma: 0.1", "kind: recal", '6:17: streams.quiet.kind: unknown kind "recal". Did you mean "recall"?'),
    ("sigma: 0.1", "kind: [1]", "6:17: streams.quiet.kind: unknown kind [1]."),
    ("sigma: 0.1", "kind: recall", '4:45: unknown key "streams.quiet.d_value". Did you mean "values"?'),
    ("sigma: 0.1", "sigma: loud", '6:18: streams.quiet.sigma should be a number, got "loud"'),
    ("sigma: 0.1", "sigma: -1", "6:18: streams.quiet: segmented_stream: sigma must be 0 to 64, or null, got -1.0"),
    ("{sigma: 0.1}", "[1]", "6:10: streams.quiet should be a mapping, got [1]"),
    ("fixed,", "fixd,", '9:20: policies.1: unknown policy "fixd". Did you mean "fixed"?'),
    ("fixed,", "single,", "9:20: policies.1: single is given twice"),
    ("fixed,", "{name: fixed, tau: 1},", '9:34: unknown key "policies.1.tau".'),
    (
        "rule: ward",
        "rule: wards",
        "9:57: policies.2.rule should be 'density', 'weak' or 'ward', got \"wards\". Did you",
    ),
    ("tau: tuned", "tau: -1", "9:44: policies.2.tau should be greater than or equal to 0 or 'tuned', got -1"),
    ("seeds: 0-2", "seeds: []", "10:8: seeds is empty"),
    ("taus: [0.4, 0.8]", "taus: []", "11:28: tuning.taus is empty"),
    ("tuning: {seeds", "tuning: {seed", '11:10: unknown key "tuning.seed". Did you mean "seeds"?'),
]


@pytest.mark.parametrize(("old", "new", "message"), WRONG, ids=[new for _, new, _ in WRONG])
def test_mistakes_are_told_where_they_were_written(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in FILE
    path = tmp_path / "small.yaml"
    path.write_text(FILE.replace(old, new))
    with pytest.raises(UserError) as error:
        Audit.load(path)
    assert f"{path}:{message}" in str(error.value)


def test_all_mistakes_come_at_once_and_overrides_are_checked_too(place: Any) -> None:
    place.write(FILE.replace("fixed,", "fixd,").replace("sigma: 0.1", "sigma: -1"), "small.yaml")
    said = place.run("audit-bias", "small.yaml", "capacity=none", "streams.quiet.tokns=3")
    assert said.code == 2
    assert [line.split(": ")[0] for line in said.err.splitlines()] == [
        'override "capacity=none"', 'override "streams.quiet.tokns=3"', "small.yaml:9:20",
    ]  # fmt: skip
    (place.folder / "list.yaml").write_text("[1]")
    assert "an audit file is a mapping, got [1]" in place.run("audit-bias", "list.yaml").err
    assert "Known: audit/" in place.run("audit-bias", "nosuch").err or "Did you mean" in place.run("run", "nosuch").err


@pytest.mark.parametrize(("name", "path"), list(shipped(audits=True)), ids=lambda x: x if isinstance(x, str) else "")
def test_shipped_audits_load(name: str, path: Path) -> None:
    audit = Audit.load(path)
    assert name == f"audit/{audit.head.name}"
    assert audit.seeds == (0, 1, 2, 3, 4)
    assert any(isinstance(policy, Dla) for policy in audit.policies)


def test_sweeps_and_audits_are_kept_apart(place: Any) -> None:
    assert not {name for name, _ in shipped()} & {name for name, _ in shipped(audits=True)}
    assert "no shipped config of that name" in place.run("run", "audit/noise").err
    assert "audit/noise" in place.run("list", "configs").out
