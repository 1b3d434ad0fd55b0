"""A diff as text and data, from records made by hand."""

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from mixassay.record import RunRecord
from mixassay.runners import diff, diff_bench, diff_report, render
from mixassay.runners.diff import Diff, Rule

NAMES = ("v0.3", "HEAD")
STEADY = (0.700, 0.703, 0.698, 0.701, 0.699)
SOLVES = (1.0, 1.0, 0.995, 1.0, 0.4), (1.0, 0.4, 1.0, 0.42, 0.41)


@pytest.fixture
def found(make_record: Callable[..., RunRecord]) -> Diff:
    """gla regressed at kv=16 and identical at kv=4, mamba2 solves less often, based is missing."""

    def runs(mixer: str, kv: int, values: Sequence[float], **fields: Any) -> list[RunRecord]:
        return [
            make_record(
                value,
                key=f"{mixer} {kv} {seed} {value}",
                cell=f"{mixer} {kv}",
                seed=seed,
                axes={"mixer": mixer, "task.num_kv": kv},
                config={"mixer": {"name": mixer}},
                eval=[{"split": "test", "cell": {}, "rows": 9, "scored": 24_000, "accuracy": value, "loss": 0.5}],
                **fields,
            )
            for seed, value in enumerate(values)
        ]

    same = runs("gla", 4, STEADY)
    base = same + runs("gla", 16, STEADY) + runs("mamba2", 4, SOLVES[0]) + runs("based", 4, STEADY)
    head = same + runs("gla", 16, [value - 0.05 for value in STEADY]) + runs("mamba2", 4, SOLVES[1])
    return diff.compare(base, head, Rule())


def test_markdown(found: Diff) -> None:
    mixers, cells = (render.markdown(grid).splitlines() for grid in diff_report.grids(found, NAMES))
    assert mixers[:3] == [
        "**demo, v0.3 → HEAD: test/accuracy in points**",
        "",
        "| mixer | verdict | cells | delta (median) | p | p (Holm) |",
    ]
    verdicts = [[text.strip() for text in line.split("|")[1:4]] for line in mixers[4:7]]
    assert verdicts == [
        ["gla", "**regressed**", "1 identical · 1 regressed"],
        ["mamba2", "no evidence", "1 no evidence"],
        ["based", "**missing**", "1 missing"],
    ]
    assert cells[2] == "| mixer | num_kv | verdict | base | head | delta | n | p | p (Holm) |"
    assert cells[4].startswith("| gla | 16 | **regressed** | 70.0 ± 0.2 | 65.0 ± 0.2 | -5.0 | 5 | ")
    assert "| mamba2 | 4 | no evidence<br>could have seen " in cells[5]
    assert "solved 4/5 → 2/5 (Boschloo p 0.34): needs 10 seeds" in cells[5]
    assert "87.9 ± 26.8 (4/5 solved)" in cells[5]
    assert cells[6] == "| based | 4 | **missing** | 70.0 ± 0.2 | – | – | 5→– | – | – |"
    assert cells[8] == "- 1 identical · 1 regressed · 1 no evidence · 1 missing"
    assert "by Holm's rule over 3 cells" in cells[10]


def test_a_suspect_says_what_it_would_take_and_then_what_came_of_it(found: Diff) -> None:
    fallen = next(change for change in found.changes if change.verdict == "regressed")
    asked = list(diff_report.notes(replace(fallen, verdict="suspect"), Rule()))
    assert asked == ["--confirm: 10 fresh runs, about 25 s"]
    (told,) = diff_report.notes(replace(fallen, fresh=fallen), Rule())
    assert told.startswith("fresh seeds 0-4: -5.0, p ")


def test_identical_cells_are_shown_when_asked_for(found: Diff) -> None:
    (_, some), (_, all_) = (list(diff_report.grids(found, NAMES, everything=yes)) for yes in (False, True))
    assert (len(some.rows), len(all_.rows)) == (3, 4)


def test_the_terminal_shows_it_all(found: Diff) -> None:
    for width in (200, 80):
        console = Console(width=width, record=True, file=io.StringIO())
        for grid in diff_report.grids(found, NAMES):
            console.print(render.rich(grid, width))
        said = console.export_text()
        assert [word for word in ("gla", "regressed", "mamba2", "needs 10 seeds", "Holm") if word not in said] == []


def test_json_has_every_number(found: Diff) -> None:
    data = json.loads(diff_report.to_json(found, [], NAMES, ["w"]))
    assert (data["base"], data["head"], data["margin"], data["warnings"]) == ("v0.3", "HEAD", 0.01, ["w"])
    assert data["counts"] == {"regressed": 1, "missing": 1, "no evidence": 1, "identical": 1}
    cell = next(cell for cell in data["cells"] if cell["verdict"] == "regressed")
    assert (cell["mixer"], cell["place"]) == ("gla", {"task.num_kv": "16"})
    assert list(cell["base"]["values"].values()) == list(STEADY)
    assert cell["p"] == pytest.approx(2 * min(cell["p_welch"], cell["p_paired"]))
    assert cell["p_adjusted"] == pytest.approx(3 * cell["p"])
    lost = next(cell for cell in data["cells"] if cell["verdict"] == "missing")
    assert lost["head"] is None


def test_benchmarks_as_a_table() -> None:
    times = {"status": "ok", "ms": 1.0, "ms_p20": 0.99, "ms_p80": 1.01}
    about = {"bench": "kernels", "op": "gla", "T": 2048, "env": {"id": "1", "class": "X", "device": "X", "cpu": "Y"}}
    peer = {**about, "implementation": "fla", "version": "0.5", "ours": False, "forward": times}
    ours = {**about, "implementation": "mixassay triton", "ours": True, "forward": times}
    slow = {**ours, "forward": {**times, "ms": 1.25, "ms_p20": 1.24, "ms_p80": 1.26}}
    changes = diff_bench.compare([ours, peer], [slow, peer])
    text = render.markdown(diff_report.of_benches(changes, NAMES))
    assert "- All: bench=kernels." in text
    assert "| op=gla T=2048 | forward | **regressed** | fla 0.5 | 1 | 1.25 | +25 % |" in text
    same = diff_bench.compare([ours, peer], [ours, peer])
    assert diff_report.of_benches(same, NAMES).rows == ()
    assert len(diff_report.of_benches(same, NAMES, everything=True).rows) == 1
