"""`mixassay eval`: language models on RULER, LongBench, common sense and in-context retrieval."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from mixassay.errors import UserError
from mixassay.record import RunRecord
from mixassay.runners.cli import RESULTS, AsJson, Results, app
from mixassay.runners.cli.files import load
from mixassay.runners.cli.report import print_grids
from mixassay.runners.eval import table
from mixassay.runners.store import Store

if TYPE_CHECKING:
    from mixassay.runners.eval.session import Options


@app.command("eval")
def eval_(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="run:KEY|runs:FILE|hf:PATH",
            help="A kept run (run.keep_weights), by the start of its key or its file; all that a sweep's table is made "
            "of, one after another; or a folder of the Hugging Face library.",
        ),
    ],
    suite: Annotated[
        Literal["ruler", "niah", "longbench", "longbench-e", "longbench-v2", "commonsense", "retrieval"],
        typer.Option("--suite", help="What to ask."),
    ],
    tasks: Annotated[str | None, typer.Option(metavar="TASK,...", help="These of the suite's tasks only.")] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="In the model's tokens: 512,1024 or 1K,16K. Of retrieval: to cut its texts to.  [ruler: 4K; niah: "
            "4K,8K,16K; retrieval: whole texts]",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Samples a task, length and seed.  [ruler, niah: 100; others: all]"),
    ] = None,
    seeds: Annotated[str, typer.Option("--seeds", metavar="N,...", help="Of the samples that are made.")] = "42",
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|hub|OWNER/NAME",
            help="DIR/longbench, DIR/squad and so on; what is missing is said. LongBench's rows also from the hub.",
        ),
    ] = None,
    essay: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A haystack of RULER: on_liberty, moby_dick, or a file.  [both]"),
    ] = None,
    compat: Annotated[
        Literal["ruler", "lm-eval"] | None, typer.Option(help="Samples as this public generator makes them.")
    ] = None,
    edit_distance: Annotated[Literal["difflib", "levenshtein"], typer.Option(help="Of LongBench's code.")] = "difflib",
    tokenizer: Annotated[
        str | None, typer.Option(metavar="bytes|PATH", help="Of a run that does not say: bytes, or a tokenizer.json.")
    ] = None,
    longest: Annotated[
        int | None,
        typer.Option("--max-length", min=2, help="Tokens the model reads: longer LongBench prompts lose their middle."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    batch: Annotated[
        int, typer.Option("--batch", min=1, help="Rows that take their steps together; fewer where memory runs out.")
    ] = 16,
    precision: Annotated[Literal["fp32", "bf16", "fp64"], typer.Option(help="Of products.")] = "fp32",
    engine: Annotated[
        Literal["auto", "lm-eval", "direct"],
        typer.Option(help="direct: without lm-eval, to the same answers.  [lm-eval where it is installed]"),
    ] = "auto",
    name: Annotated[str | None, typer.Option("--name", help="Of the records' folder.  [the suite]")] = None,
    plugins: Annotated[
        list[str] | None, typer.Option("--plugin", metavar="FILE|MODULE", help="What the run's mixer needs.")
    ] = None,
    results: Results = RESULTS,
    as_json: AsJson = False,
) -> None:
    """Evaluate a language model; print and store a score for each task and length.

    Before it is asked anything, a model that copies the right answers must score 100 and one that writes noise 0. Works
    without network, except --data hub. `mixassay report DIR/NAME` prints what is stored; its --plot draws depth by
    length.

    Exit code: 0 done; 2 a mistake in the command or missing data; 3 some of the models of runs:FILE failed; 4 a canary
    died, and no number was printed.
    """
    from mixassay.runners.eval.canary import Refused
    from mixassay.runners.eval.session import Options, evaluate  # imports torch
    from mixassay.runners.eval.suites import data_of
    from mixassay.runners.faults import disk

    options = Options(
        model=model,
        suite=suite,
        results=results,
        tasks=words(tasks),
        lengths=tuple(dict.fromkeys(length(text) for text in words(lengths))),
        seeds=tuple(dict.fromkeys(number(text) for text in words(seeds))),  # twice, they would halve a variance
        limit=limit,
        data=data_of(data, suite),
        essay=tuple(essay or ()),
        compat=compat,
        edit_distance=edit_distance,
        tokenizer=tokenizer,
        longest=longest,
        device=device,
        batch=batch,
        precision=precision,
        engine=engine,
        name=name,
        plugins=tuple(plugins or ()),
    )
    errors = Console(stderr=True)

    def tell(text: str) -> None:
        errors.print(text, markup=False, highlight=False, soft_wrap=True)

    records: list[RunRecord] = []
    models, failed = each(options, tell), 0
    try:
        for title, one in models:
            if title:
                tell(title)
            try:
                records += evaluate(one, tell)
            except UserError as problem:
                if len(models) == 1:
                    raise
                tell(f"{title}: {problem}")
                failed += 1
    except Refused as problem:
        tell(str(problem))
        raise typer.Exit(4) from None
    except OSError as problem:
        if (reason := disk(problem)) is None:
            raise
        raise UserError(f"cannot write to {results}: {reason}; {GOES_ON}") from problem
    except SystemExit:  # what Ctrl-C is here (`cli.main`)
        tell(f"stopped: {GOES_ON}")
        raise
    if records:
        show(records, as_json)
    if failed:
        raise typer.Exit(3)


GOES_ON = "all sets before are kept, and the same command goes on behind them"


def each(options: "Options", tell: Callable[[str], None]) -> list[tuple[str, "Options"]]:
    """Of `runs:FILE` each run that the sweep's table is made of and whose weights are kept, with a title."""
    kind, _, file = options.model.partition(":")
    if kind != "runs":
        return [("", options)]
    from mixassay.runners import session, weights  # imports torch

    sweep = load(file, None, None, None)
    stored = Store(options.results).read(sweep.name).records
    shown = session.table(sweep, stored, options.results)
    runs = {record.key: (entry.runs.cell, record) for entry in shown.entries.values() for record in entry.runs.ok}
    kept = {key for key in runs if weights.place(options.results, sweep.name, key).is_file()}
    if not kept:
        raise UserError(
            f"{file}: {none_kept(len(runs), len(stored))}; `mixassay run {file} run.keep_weights=true` keeps them"
        )
    found = []
    for key, (cell, record) in runs.items():
        title = f"{cell} seed {record.seed}"
        if key in kept:
            plugins = (*options.plugins, *sweep.plugins)
            found.append((title, replace(options, model=f"run:{key}", plugins=plugins)))
        else:
            tell(f"{title}: left out, since its weights are not kept")
    return found


def none_kept(shown: int, stored: int) -> str:
    if shown:
        return f"none of the {shown} runs in its table has kept its weights"
    if stored:
        return f"none of the {stored} stored runs of it has the file's settings (--model run:KEY takes any)"
    return "no run of it is stored"


def show(records: list[RunRecord], as_json: bool) -> None:
    found = table.collect(records)
    if as_json:
        print(json.dumps(table.long_form(found), indent=1))
    else:
        print_grids([table.grid(found)], "rich")


def words(text: str | None) -> tuple[str, ...]:
    """Each once, however often it is named."""
    return tuple(dict.fromkeys(word.strip() for word in (text or "").split(",") if word.strip()))


LONGEST = 1 << 24


def length(text: str) -> int:
    """4096, 4K or 4k."""
    if not (found := re.fullmatch(r"(\d+)([kK]?)", text)):
        raise UserError(f"--lengths: {text} is no number of tokens such as 4096 or 4K")
    tokens = int(found[1]) * (1024 if found[2] else 1)
    if not tokens:
        raise UserError("--lengths: a prompt of 0 tokens asks nothing")
    if tokens > LONGEST:
        raise UserError(f"--lengths: {text} is more than {LONGEST:,} tokens")
    return tokens


def number(text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"--seeds: {text} is no whole number")
    return int(text)
