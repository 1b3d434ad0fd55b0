"""The HTML page: that it holds the table's numbers and nothing foreign, and what it does in a browser."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mixassay.record import RunRecord
from mixassay.runners import page, render, report
from mixassay.runners.page.card import command
from mixassay.sweep import Sweep, conditions

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
EVIL = "</script><script>document.title='taken'</script><b>&"
YAML = """
version: 1
name: demo
task: {name: mqar, vocab_size: 512, seq_len: 256, num_kv: 4}
train: {steps: 10}
sweep:
  grid:
    mixer: [attention, {name: attention, window: 16}, mamba2]
    task.num_kv: [4, 16]
seeds: [0, 1, 2]
report: {title: "EVIL"}
""".replace("EVIL", EVIL)
WORDS = ["demo.yaml", "train.steps=10"]
Make = Callable[..., RunRecord]


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    (tmp_path / "demo.yaml").write_text(YAML)
    return Sweep.load(tmp_path / "demo.yaml")


@pytest.fixture
def text(sweep: Sweep, record_of: Make) -> str:
    """attention .95, .85 with a window, mamba2 .45, + seed/100 and - num_kv/100; mamba2's last seed diverged."""
    found = []
    for cell in sweep.cells():
        mixer, pairs = cell.sections.mixer, cell.sections.task.args["num_kv"]
        level = (0.85 if mixer.args else 0.95) if mixer.name == "attention" else 0.45
        for run in sweep.reported(cell):
            lost = mixer.name == "mamba2" and run.seed == 2
            error = {"type": "Diverged", "message": EVIL} if lost else None
            curve = {"step": (5, 10), "valid/accuracy": (0.1, level)}
            found.append(record_of(run, None if lost else level + (run.seed - pairs) / 100, error=error, curve=curve))
    table = report.build(sweep, found)
    made = page.html(table, sweep, WORDS, [render.grid(table)])
    assert made == page.html(table, sweep, WORDS, [render.grid(table)]), "the same table gives the same bytes"
    return made


class Reader(HTMLParser):
    """The texts of the sortable table, and every element and attribute of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.replace("\n", "")


def test_the_numbers_stand_in_the_file(text: str) -> None:
    rows = Reader(text).rows
    shown = next(row for row in rows if row[0].strip() == "mamba2" and row[1] == "16")
    assert shown[2:7] == ["29.5 ± 0.7 (2/3, 1 diverged)", "", "2", "29.0", "0/3"]
    assert [row[0].strip() for row in rows].count("attention window=16") == 2 + 1 + 1  # long, wide and `against`


def test_it_asks_for_nothing_from_elsewhere(text: str) -> None:
    found = Reader(text)
    assert {"link", "img", "iframe", "object", "base", "form"}.isdisjoint(found.elements)
    assert [value for name, value in found.attributes if name in ("src", "srcset", "action", "data")] == []
    assert all(value.startswith("#") for name, value in found.attributes if name == "href")
    assert re.search(r"https?:|@import|url\(|fetch|XMLHttp|WebSocket", text) is None
    assert ("content", page.POLICY) in found.attributes


def test_texts_of_records_are_texts(text: str) -> None:
    assert Reader(text).elements.count("script") == 2
    assert EVIL not in text


def test_the_card_has_every_seed_and_the_configuration(text: str) -> None:
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    entry = next(e for e in data["entries"] if e["name"] == "mamba2, num_kv=16")
    cell = data["cells"][entry["cell"]]
    assert entry["values"] == {"0": "29.0", "1": "30.0"}
    assert cell["runs"] == [[0, "ok, 2.5 s"], [1, "ok, 2.5 s"], [2, f"diverged, 2.5 s, Diverged: {EVIL}"]]
    assert dict(cell["config"])["task.num_kv"] == "16"
    assert dict(data["shared"])["train.steps"] == "10"
    assert dict(data["shared"]).keys().isdisjoint(dict(cell["config"]))
    assert cell["code"] == "code aaaaaaaaaaaa, data mqar/1, cpu, torch 2.13"


def test_the_command_trains_that_configuration_and_no_other(sweep: Sweep) -> None:
    shipped = Sweep.load(Path(page.__file__).parents[2] / "configs/mqar/zoology_figure2.yaml")
    for one in (sweep, shipped):
        for cell in one.cells():
            words = shlex.split(command(one, cell, WORDS))
            assert words[:4] == ["mixassay", "run", *WORDS]
            assert one.only(conditions(words[words.index("--only") + 1])).cells() == [cell]
            assert words[-2:] == ["--seeds", "0-4" if one is shipped else "0-2"]


def test_seeds_of_a_command_are_written_as_they_are_read(tmp_path: Path) -> None:
    for seeds, said in (("[3]", "3-3"), ("[0, 2]", "[0, 2]"), ("[1, 0]", "[1, 0]")):
        (tmp_path / "x.yaml").write_text(YAML.replace("[0, 1, 2]", seeds))
        found = Sweep.load(tmp_path / "x.yaml")
        words = shlex.split(command(found, found.cells()[0], ["x.yaml"]))
        assert words[-1] == said
        assert Sweep.load(tmp_path / "x.yaml", [f"seeds={said}"]).seeds == found.seeds


# Does what a reader does, and leaves what it saw in the page for --dump-dom.
ACTS = """
const seen = {};
const names = () => rows.map((row) => row).sort((a, b) => a.rowIndex - b.rowIndex).filter((row) => !row.hidden)
  .map((row) => row.cells[0].textContent.trim() + " " + row.cells[1].textContent);
const press = (n) => document.querySelectorAll("#runs th")[n].querySelector("button").click();
const type = (words) => { field.value = words; field.dispatchEvent(new Event("input")); };
const over = (node) => node.dispatchEvent(new PointerEvent("pointerover", { bubbles: true, clientX: 50, clientY: 50 }));
seen.before = names();
press(2); seen.up = names();
press(2); seen.down = names();
press(2); seen.again = names();
press(1); seen.pairs = names(); press(1); press(1);
type("mamba2"); seen.filtered = names(); seen.count = document.getElementById("count").value;
seen.figures = all("figure").filter((one) => !one.hidden).length;
type("-mamba2 num_kv=16"); seen.without = names();
type(""); seen.all = names().length;
over(document.querySelector('#runs circle[data-cell="5"][data-seed="1"]'));
seen.card = floating.textContent; seen.lit = floating.querySelector(".lit").textContent;
seen.shown = !floating.hidden; seen.inside = floating.getBoundingClientRect().right <= innerWidth;
over(document.querySelector("h1")); seen.gone = floating.hidden;
rows[0].click(); seen.pinned = document.querySelector(".detail").textContent;
rows[0].click(); seen.unpinned = document.querySelector(".detail") === null;
rows[1].dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
seen.key = document.querySelector(".detail") !== null;
const ground = () => getComputedStyle(document.body).backgroundColor;
seen.ground = [ground()];
for (let n = 0; n < 2; n++) { document.getElementById("theme").click(); seen.ground.push(ground()); }
seen.title = document.title;
seen.requests = performance.getEntriesByType("resource").length;
document.body.replaceChildren(element("pre", "", JSON.stringify(seen)));
"""


@pytest.fixture
def browse(tmp_path: Path) -> Callable[..., Any]:
    """What a headless browser saw: `browse(html, *options)`."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser found: none of {', '.join(BROWSERS)}")

    def browse(text: str, *options: str) -> Any:
        (tmp_path / "page.html").write_text(text.replace("</body>", f"<script>{ACTS}</script></body>"))
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", profile, *options, "--dump-dom"]
        done = subprocess.run([*command, (tmp_path / "page.html").as_uri()], capture_output=True, text=True, timeout=60)
        found = re.search(r"<pre>(.*)</pre>", done.stdout, re.S)
        assert found, done.stderr[-2000:]
        return json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))

    return browse


def test_in_a_browser(browse: Callable[..., Any], text: str) -> None:
    seen = browse(text)
    order = [f"{mixer} {pairs}" for mixer in ("attention", "attention window=16", "mamba2") for pairs in (4, 16)]
    assert seen["before"] == order
    by_accuracy = [
        "mamba2 16",
        "mamba2 4",
        "attention window=16 16",
        "attention 16",
        "attention window=16 4",
        "attention 4",
    ]
    assert seen["up"] == by_accuracy
    assert seen["down"] == by_accuracy[::-1]
    assert seen["again"] == order
    assert [name.split()[-1] for name in seen["pairs"]] == ["4"] * 3 + ["16"] * 3, "as numbers, not as words"
    assert seen["filtered"] == ["mamba2 4", "mamba2 16"]
    assert seen["count"] == "2 of 6 rows"
    assert seen["figures"] == 1 + 2 + 2, "one against num_kv, two of state, two learning curves"
    assert seen["without"] == ["attention 16", "attention window=16 16"]
    assert seen["all"] == 6
    assert seen["shown"]
    assert seen["inside"]
    assert seen["gone"]
    assert "seed 130.0ok, 2.5 s" in seen["lit"]
    for words in (
        "mixassay run demo.yaml train.steps=10 --only mixer=mamba2,task.num_kv=16 --seeds 0-2",
        "diverged",
        EVIL,
    ):
        assert words in seen["card"]
    assert "train.batch_size" in seen["pinned"]
    assert seen["unpinned"]
    assert seen["key"]
    white, night = "rgb(255, 255, 255)", "rgb(21, 24, 28)"
    assert seen["ground"] == [white, night, white]
    assert seen["title"] == EVIL, "as a text"
    assert seen["requests"] == 0


def test_readers_who_prefer_dark_get_it(browse: Callable[..., Any], text: str) -> None:
    assert browse(text, "--blink-settings=preferredColorScheme=0")["ground"][0] == "rgb(21, 24, 28)"


def test_the_command_line(place: Any, sweep: Sweep, record_of: Make) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from mixassay.runners.store import Store

    Store("results").append(record_of(run, 0.5, suite="demo") for run in sweep.reported(sweep.cells()[0]))
    said = place.run("report", "demo.yaml", "--html", "x.html", "--plot", "x.svg", "--figure", "state")
    assert (said.code, said.err.splitlines()[-2:]) == (0, ["written to x.html", "drawn to x.svg"])
    assert "mixassay run demo.yaml --only" in Path("x.html").read_text()
    assert "against state" in Path("x.svg").read_text()
    for words, message in (
        (["--plot", "x.bmp"], "x.bmp should end in"),
        (["--figure", "state"], "--figure says what --plot draws"),
        (["--html", "none/x.html"], "cannot write to none/x.html"),
        (["--plot", "x.svg", "--figure", "curves"], "no curves to draw"),
    ):
        said = place.run("report", "demo.yaml", *words)
        assert said.code == 2
        assert message in said.err
