"""The committed simulation of `diff` is what its code gives, to the error of a smaller one."""

import math
import re
from pathlib import Path

import pytest

from mixassay.runners import diff_power

PAGE = (Path(__file__).parents[2] / "docs/diff-power.md").read_text()
SMALL = 300


def committed() -> dict[str, dict[str, float]]:
    """Case -> column -> rate, of both tables."""
    found: dict[str, dict[str, float]] = {}
    heads: list[str] = []
    for line in re.findall(r"^\| (.*) \|$", PAGE, re.M):
        name, *texts = (text.strip() for text in line.split(" | "))
        if not name or line.startswith(" |"):
            heads = [text.strip() for text in line.split("|")][1:]
        elif name != "---":
            found[name] = {head: float(text) for head, text in zip(heads, texts, strict=True) if text}
    return found


CASES = {case.name: case for case in (*diff_power.singles(), *diff_power.tables())}


def test_every_case_is_in_the_page() -> None:
    assert committed().keys() == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_a_small_run_agrees_with_the_page(name: str) -> None:
    repeats = SMALL if isinstance(CASES[name], diff_power.Table) else 10 * SMALL
    rates = CASES[name].rates(diff_power.stream(name + " again"), repeats)
    wanted = committed()[name]
    assert rates.keys() == wanted.keys()
    for column, rate in rates.items():
        if column == "suspects":
            assert rate == pytest.approx(wanted[column], abs=0.3)
        else:
            p = wanted[column]
            error = math.sqrt(max(p * (1 - p), 1 / repeats) / repeats)
            assert rate == pytest.approx(p, abs=4 * error + 1e-3), column


def test_what_the_page_promises() -> None:
    """A false alarm in at most one diff of twenty, confirmation and mixers included; and the power to see."""
    tables = {name: rates for name, rates in committed().items() if "false: any" in rates}
    assert max(rates["false: any"] for rates in tables.values()) <= 0.05
    assert tables["no change, rho 0"]["false: raw p < .05"] > 0.7, "which is why p is adjusted"
    assert tables["one cell near 100: -35"]["seen: Holm"] >= 0.99
    assert tables["one cell of sd 1: -5, rho 0"]["seen: confirmed"] >= 0.99
    assert tables["one mixer, 12 cells: -3"]["seen: mixer"] >= 0.99
