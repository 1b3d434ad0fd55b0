"""The command `mixassay`: its verbs, in modules by what they are about. They parse, call and print."""

import importlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

import mixassay
from mixassay.errors import UserError

app = typer.Typer(
    name="mixassay",
    help="Compare sequence mixers on synthetic tasks: one YAML file in, a table of means and deviations out.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

File = Annotated[str, typer.Argument(metavar="FILE", help="A sweep file, or the name of a shipped one: quickstart.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values set over the file's: train.steps=100", show_default=False),
]
Only = Annotated[str | None, typer.Option(metavar="CONDITIONS", help="These cells only: mixer=gla,task.num_kv=[4, 8]")]
Seeds = Annotated[
    str | None, typer.Option("--seeds", metavar="SEEDS", help="These seeds instead of the file's: 0-4 or [0, 7]")
]
Results = Annotated[Path, typer.Option(metavar="DIR", help="Where results are kept.", envvar="MIXASSAY_RESULTS")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs: JSON on standard output.")]

RESULTS = Path("results")


def version(wanted: bool) -> None:
    if wanted:
        print(f"mixassay {mixassay.__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[bool, typer.Option("--version", callback=version, is_eager=True, help="The version.")] = False,
) -> None:
    pass


def load_verbs() -> None:
    """Import the modules of the verbs, which add themselves to `app`, in the order of `--help`."""
    for module in ("run", "report", "diff", "check", "new", "audit", "inspect", "export", "eval", "rescore", "bench"):
        importlib.import_module(f"{__name__}.{module}")


def main() -> None:
    """Run the command line. A user's mistake is one line and exit code 2; a bug keeps its traceback."""
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    load_verbs()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        app()
    except UserError as problem:
        print(problem, file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # `mixassay list configs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
