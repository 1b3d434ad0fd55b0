"""Tables of evaluations: how many seeds a cell has, what is missing, and what the caption says of both."""

from collections.abc import Iterable
from typing import Any

import pytest

from mixassay.record import RunRecord
from mixassay.runners.eval import table

ALL = (0, 1, 2)


@pytest.fixture
def evaluated(make_record: Any) -> Any:
    """A record for each seed of each (mixer, task, length): accuracy (5 + seed) / 10 of 50 samples."""

    def make(cells: dict[tuple[str, str, int], Iterable[int]]) -> list[RunRecord]:
        return [
            make_record(
                metrics={"test/accuracy": (5 + seed) / 10, "test/stderr": 0.07},
                key=f"{mixer}{task}{length}{seed}",
                cell=f"{mixer}{task}{length}",
                seed=seed,
                config={
                    "mixer": {"name": mixer},
                    "model": {},
                    "train": {},
                    "task": {"name": task, "length": length, "samples": 50},
                },
                samples={"prompts": "p", "answers": "a"},
                eval=[],
            )
            for (mixer, task, length), seeds in cells.items()
            for seed in seeds
        ]

    return make


def shown(records: list[RunRecord]) -> tuple[list[tuple[str, ...]], str]:
    """The cells of each row, numbers with their marks and n, and what the caption says of seeds."""
    grid = table.grid(table.collect(records))
    (said,) = [line for line in grid.caption if line.startswith("Seeds ")]
    rows = [tuple(" ".join(filter(None, (cell.text, cell.mark, *cell.small))) for cell in row) for row in grid.rows]
    return rows, said.partition(".")[0]


def test_a_cell_with_fewer_seeds_says_so_and_a_missing_one_is_a_dash(evaluated: Any) -> None:
    rows, said = shown(
        evaluated(
            {
                ("attention", "niah_single_1", 1024): ALL,
                ("attention", "niah_single_1", 2048): (1,),
                ("attention", "niah_single_2", 1024): ALL,
                ("mamba2", "niah_single_1", 1024): (0, 2),
                ("mamba2", "niah_single_1", 2048): ALL,
                ("mamba2", "niah_single_1", 4096): ALL,
                ("mamba2", "niah_single_2", 1024): (0, 1),
            }
        )
    )
    assert rows == [
        ("niah_single_1", "attention", "60.0 ± 10.0 n=3x50", "60.0 (se 7.0) (1/3) n=50", "–"),
        ("niah_single_1", "mamba2", "60.0 ± 14.1 (2/3) n=2x50", "60.0 ± 10.0 n=3x50", "60.0 ± 10.0 n=3x50"),
        ("niah_single_2", "attention", "60.0 ± 10.0 n=3x50", "–", "–"),
        ("niah_single_2", "mamba2", "55.0 ± 7.1 (2/3) n=2x50", "–", "–"),
        ("mean of 2", "attention", "60.0 ± 10.0", "–", "–"),
        ("mean of 2", "mamba2", "50.0 (1/3)", "–", "–"),  # of the one seed that both tasks have
    ]
    assert said == "Seeds 0-2; a cell with fewer says how many"


@pytest.mark.parametrize(
    ("seeds", "said"),
    [
        ({"attention": ALL, "mamba2": ALL}, "Seeds 0-2"),
        ({"attention": ALL, "mamba2": (1,)}, "Seeds 0-2; a cell with fewer says how many"),
        ({"attention": ALL, "mamba2": (42,)}, "Seeds 0-2 of attention; 42 of mamba2"),
        ({"attention": (0, 1), "mamba2": (0, 2)}, "Seeds 0-1 of attention; 0, 2 of mamba2"),
    ],
)
def test_the_caption_tells_seeds_once(evaluated: Any, seeds: dict[str, tuple[int, ...]], said: str) -> None:
    assert shown(evaluated({(name, "niah_single_1", 1024): of for name, of in seeds.items()}))[1] == said


def test_seeds_of_each_model_and_a_cell_with_fewer(evaluated: Any) -> None:
    cells = {("attention", "t", 1024): (0, 1), ("mamba2", "t", 1024): (2, 3), ("mamba2", "t", 2048): (3,)}
    rows, said = shown(evaluated(cells))
    assert said == "Seeds 0-1 of attention; 2-3 of mamba2; a cell with fewer says how many"
    assert rows[0][2:] == ("55.0 ± 7.1 n=2x50", "–")
    assert rows[1][3] == "80.0 (se 7.0) (1/2) n=50"


def test_one_seed_needs_no_count(evaluated: Any) -> None:
    rows, said = shown(evaluated({("attention", "t", 1024): (3,), ("attention", "t", 2048): (3,)}))
    assert rows == [("t", "attention", "80.0 (se 7.0) n=50", "80.0 (se 7.0) n=50")]
    assert said == "Seeds 3"


def test_wrong_answers_that_are_another_needles_value_are_counted(evaluated: Any) -> None:
    """attention: 50 x (.5 + .4) = 45 wrong at two seeds, 20 + 10 of them another's; mamba2: 25, 25."""
    records = evaluated(
        {("attention", "mk", 1024): (0, 1), ("mamba2", "mk", 1024): (0,), ("mamba2", "single", 1024): (0,)}
    )
    shares = iter((0.4, 0.2, 0.5))
    told = [
        r.model_copy(update={"metrics": {**r.metrics, "test/wrong_needle": next(shares)}})
        if r.config["task"]["name"] == "mk"
        else r
        for r in records
    ]
    said = "Wrong answers to mk that are another needle's value: 67 % of 45 (attention), 100 % of 25 (mamba2)."
    assert [line for line in table.grid(table.collect(told)).caption if "needle" in line] == [said]
    assert not [line for line in table.grid(table.collect(records)).caption if "needle" in line]
