import io
import json
from collections.abc import Callable

import pytest
import scipy.stats
from rich.console import Console

from mixassay.errors import UserError
from mixassay.runners import export, published, render, report
from mixassay.sweep import Sweep

YAML = """
version: 1
name: demo
task: {name: mqar, seq_len: 64, num_kv: 8}
train: {steps: 10}
model: {d_model: 16}
sweep: {grid: {mixer: [attention, mamba2, linear_attention]}}
seeds: [0, 1, 2, 3, 4]
"""


@pytest.fixture
def table(tmp_path, make_record) -> report.Table:
    """attention 1.0 everywhere, mamba2 46.0 ± 2.74 at width 16, and a mixer that is not in the paper."""
    values = {
        "attention": [1.0] * 5,
        "mamba2": [0.46, 0.44, 0.50, 0.47, 0.43],
        "linear_attention": [0.1, 0.2, 0.3, 0.4, 0.5],
    }
    (tmp_path / "demo.yaml").write_text(YAML)
    sweep = Sweep.load(tmp_path / "demo.yaml")
    records = [
        make_record(value, cell=run.cell, seed=run.seed, key=f"{run.cell}{run.seed}", config=run.config())
        for cell in sweep.cells()
        for run, value in zip(sweep.reported(cell), values[cell.sections.mixer.name], strict=True)
    ]
    return report.build(sweep, records)


def test_the_shipped_tables_load():
    assert published.shipped() == ["log-linear-mqar"]
    for name in published.shipped():
        assert published.load(name).rows


def test_the_log_linear_table_holds_what_the_paper_prints():
    loaded = published.load("log-linear-mqar")
    printed = {
        mixer: [f"{'>=' if v.bound else ''}{v.mean:g} ({v.std})" for v in row.values()]
        for mixer, row in loaded.rows.items()
    }
    assert printed == {
        "attention": [">=99 (None)"] * 3,
        "mamba2": ["46.9 (2.3)", "75.1 (4.9)", "89.6 (6.1)"],
        "log_linear_mamba2": ["55.9 (9.1)", "76.5 (4.8)", "92.9 (2.7)"],
        "gated_deltanet": ["38.4 (1.0)", "79 (2.1)", ">=99 (None)"],
        "log_linear_gated_deltanet": ["40 (1.4)", "84.4 (1.2)", ">=99 (None)"],
    }
    assert [len(rerun.rows) for rerun in loaded.reruns] == [2, 1, 4]


def test_differences_are_welchs_from_summaries(table):
    pairs = {(p.mixer, p.whose): p for p in published.compare(table, published.load("log-linear-mqar"))}
    assert {mixer for mixer, _ in pairs} == {"attention", "mamba2"}
    paper = pairs["mamba2", "published"]
    std = (30 / 4) ** 0.5
    test = scipy.stats.ttest_ind_from_stats(46.0, std, 5, 46.9, 2.3, 5, equal_var=False)
    d = paper.difference
    assert d.value == pytest.approx(-0.9)
    assert d.se == pytest.approx(d.value / test.statistic)
    assert d.df == pytest.approx(7.768, abs=1e-3)  # 2.558^2 / (1.5^2 / 4 + 1.058^2 / 4)
    assert (d.low, d.high) == (pytest.approx(-4.608, abs=2e-3), pytest.approx(2.808, abs=2e-3))
    rerun = pairs["mamba2", "rerun, early stop"]
    assert rerun.theirs.mean == pytest.approx(45.56), "from the seeds themselves where they are known"
    assert rerun.theirs.std == pytest.approx(4.749, abs=1e-3)  # sqrt((1.34^2 + 3.76^2 + 4.96^2 + 7.04^2 + 0.34^2) / 4)


def test_a_bound_is_no_number(table):
    found = published.compare(table, published.load("log-linear-mqar"))
    (pair,) = [p for p in found if p.mixer == "attention"]
    assert pair.bound
    assert (pair.difference.value, pair.difference.low, pair.difference.clear) == (pytest.approx(1.0), None, False)


def test_the_comparison_as_texts(table):
    shown = published.grid(table, published.load("log-linear-mqar"))
    assert [[cell.text for cell in row] for row in shown.rows] == [
        ["attention", "16", "100.0 ± 0.0 (n=5)", "published", "≥ 99", "≤ +1.0", ""],
        ["mamba2", "16", "46.0 ± 2.7 (n=5)", "published", "46.9 ± 2.3 (n=5)", "-0.9", "[-4.6, +2.8]"],
        ["", "", "", "rerun, early stop", "45.6 ± 4.7 (n=5)", "+0.4", "[-5.5, +6.4]"],
        ["", "", "", "rerun, all epochs", "41.3 ± 2.7 (n=5)", "+4.7", "[+0.8, +8.7]"],
    ]
    told = " ".join(shown.caption)
    assert "arXiv 2506.04761" in told
    assert "Intervals that leave out 0: published 0 of 1; rerun, early stop 0 of 1; rerun, all epochs 1 of 1." in told
    assert "smat_attention" in told
    assert "GDN heads 1/2/2:" not in told, "a rerun without a counterpart is not quoted"
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render.rich(shown, 80))
    assert "[-4.6, +2.8]" in console.export_text()
    assert "≥" not in render.latex(shown)
    assert r"$\geq$ 99" in render.latex(shown)


def test_what_becomes_of_a_claim(tmp_path, make_record):
    """Ours: 46.0 ± 2.74 and ten points more."""
    (tmp_path / "demo.yaml").write_text(
        YAML.replace("attention, mamba2, linear_attention", "mamba2, log_linear_mamba2")
    )
    sweep = Sweep.load(tmp_path / "demo.yaml")
    records = [
        make_record(value + 0.1 * place, cell=run.cell, seed=run.seed, key=f"{run.cell}{run.seed}", config=run.config())
        for place, cell in enumerate(sweep.cells())
        for run, value in zip(sweep.reported(cell), [0.46, 0.44, 0.50, 0.47, 0.43], strict=True)
    ]
    shown = published.claims(report.build(sweep, records), published.load("log-linear-mqar"))
    first, second, third, wider = [[cell.text for cell in row] for row in shown.rows[:4]]
    assert first == ["log_linear_mamba2", "mamba2", "16", "ours", "+10.0", "[+6.0, +14.0]"]  # 2.306 * sqrt(2 * 1.5)
    low, high = (9.0 + sign * scipy.stats.t.ppf(0.975, 4.509) * (9.1**2 / 5 + 2.3**2 / 5) ** 0.5 for sign in (-1, 1))
    assert second == ["", "", "", "published", "+9.0", f"[{low:+.1f}, {high:+.1f}]"]
    assert third[3] == "rerun, all epochs"
    assert wider[:4] == ["log_linear_mamba2", "mamba2", "32", "published"], "we have no number there"
    at_64 = [row for row in shown.rows if row[0].text == "log_linear_gated_deltanet" and row[2].text == "64"]
    assert [cell.text for cell in at_64[0]][3] == "rerun, all epochs", "a bound is no number"


def test_the_comparison_as_data(table):
    data = json.loads(export.to_json(table, published.long_form(table, published.load("log-linear-mqar"))))
    bound, paper, *_ = data["against"]
    assert (bound["bound"], bound["interval"]) == (">=", None)
    assert paper["theirs"] == {"mean": 46.9, "std": 2.3, "n": 5}
    assert paper["model.d_model"] == "16"


PUBLISHED = """\
title: t
source: s
read_from: r
metric: test/accuracy
n: 5
std: unknown
task: t
note: n
column: model.d_model
rows:
  gla:
    "16": {mean: 50, std: 1.0}
"""


@pytest.fixture
def write(tmp_path) -> Callable[[str], str]:
    def write(content: str) -> str:
        (tmp_path / "table.yaml").write_text(content)
        return str(tmp_path / "table.yaml")

    return write


def test_a_table_of_ones_own(table, write):
    shown = published.grid(table, published.load(write(PUBLISHED)))
    assert shown.rows == ()
    assert shown.warnings == (
        "none of our numbers has a counterpart: the published table has mixers gla and model.d_model",
    )
    loss = write(PUBLISHED.replace("test/accuracy", "test/loss"))
    with pytest.raises(UserError, match="not comparable"):
        published.compare(table, published.load(loss))


def test_faults_of_a_table_are_told_with_their_place(write):
    for old, new, fault in (
        ("mean: 50", "maen: 50", r"table\.yaml:12:\d+: rows\.gla\.16\.m"),
        ("std: 1.0}", "std: 1.0, seeds: [40, 41]}", r"table\.yaml:12:\d+: .*mean 50.0 does not follow from the seeds"),
        ("n: 5", "n: 0", r"table\.yaml:5:4: n: "),
        ("rows:", "claims: [{of: gla, over: mamba2}]\nrows:", r"table\.yaml:.*a claim is about .mamba2."),
        ("source: s\n", "", r"table\.yaml:1:1: source: "),
    ):
        with pytest.raises(UserError, match=fault):
            published.load(write(PUBLISHED.replace(old, new)))
    with pytest.raises(UserError, match=r'no published table "log-linear-mqra"\. Did you mean "log-linear-mqar"'):
        published.load("log-linear-mqra")
