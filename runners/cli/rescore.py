"""`mixassay rescore`: the scores of LongBench predictions that were kept in files."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from mixassay.runners.cli import AsJson, app
from mixassay.runners.longbench.metrics.code import EditDistance
from mixassay.runners.longbench.rescore import Rescored
from mixassay.runners.longbench.rescore import rescore as rescored


@app.command()
def rescore(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="NAME.jsonl for each set, as LongBench writes them; result.json.")
    ],
    by_length: Annotated[
        bool, typer.Option("--by-length", help="LongBench-E: scores for 0-4k, 4-8k and 8k+ words.")
    ] = False,
    edit_distance: Annotated[
        EditDistance, typer.Option(help="Of code. levenshtein: as where python-Levenshtein was installed.")
    ] = "difflib",
    as_json: AsJson = False,
) -> None:
    """Score kept LongBench predictions anew.

    Predictions are lines of JSON with the fields pred, answers, all_classes and length. Scores published with them,
    in result.json, are shown beside. Needs the extra `lm`.
    """
    console = Console(stderr=True)
    with console.status("scoring", spinner_style="dim"):
        found = list(rescored(folder, by_length=by_length, edit_distance=edit_distance))
    if as_json:
        print(json.dumps([_flat(one) for one in found], indent=1))
        return
    table = Table("set", *(["words"] if by_length else []), "metric", box=None, pad_edge=False)
    for head in ("score", "published", "rows"):
        table.add_column(head, justify="right")
    table.add_column("scored with")
    for score, bin, published in found:
        table.add_row(
            score.dataset,
            *([bin] if bin else []),
            score.metric,
            f"{score.value:.2f}",
            "" if published is None else f"{published:.2f}",
            f"{score.n}" if score.of in (None, score.n) else f"{score.n} of {score.of}",
            ", ".join(f"{tool} {what}" for tool, what in score.tools.items()),
        )
    Console().print(table)


def _flat(one: Rescored) -> dict[str, object]:
    score = one.score
    return {
        "set": score.dataset,
        "bin": one.bin,
        "metric": score.metric,
        "score": score.value,
        "published": one.published,
        "n": score.n,
        "of": score.of,
        "tools": score.tools,
    }
