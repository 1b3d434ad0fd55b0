"""`mixassay new`: files to start from."""

from pathlib import Path
from typing import Annotated

import typer

from mixassay.runners.cli import app
from mixassay.runners.scaffold import write_mixer

new = typer.Typer(help="Write files to start from.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(new, name="new")


@new.callback()
def about() -> None:
    pass


@new.command()
def mixer(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name in sweep files, such as my_mixer.")],
    folder: Annotated[Path, typer.Option("--dir", metavar="DIR", help="Where the files go.")] = Path(),
) -> None:
    """Write a mixer, its test and a sweep that compares it: NAME.py, test_NAME.py and NAME.yaml.

    All three run as they are: mixassay check NAME.py, pytest test_NAME.py, mixassay run NAME.yaml.
    """
    for path in write_mixer(name, folder):
        print(path)
