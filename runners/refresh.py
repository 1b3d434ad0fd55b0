"""Documents that say which commands made their tables and pictures, and the command that makes them anew.

    python -P -m mixassay.runners.refresh results/mqar/REPORT.md

Between these two lines of a document stands what the command prints; the tool puts it there:

    <!-- shows: mixassay report configs/quickstart.yaml --format md -->
    <!-- end -->

This one is run for the file it writes, a picture as a rule:

    <!-- makes: mixassay report configs/quickstart.yaml --plot docs/x.svg -->

Commands run in the current folder, and are `mixassay` commands only.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from mixassay.errors import UserError

SHOWS = re.compile(r"(^<!-- shows: (?P<words>[^\n]+) -->$).*?(^<!-- end -->$)", re.M | re.S)
MAKES = re.compile(r"^<!-- makes: (?P<words>.+) -->$", re.M)


def refreshed(text: str) -> str:
    """The document with the present output of its commands, those that make files run too.

    Raises `UserError` for a command that fails, and for a table without its end.
    """
    opened = len(re.findall(r"^<!-- shows: ", text, re.M))
    if opened != len(SHOWS.findall(text)) or opened != len(re.findall(r"^<!-- end -->$", text, re.M)):
        raise UserError('every "<!-- shows: COMMAND -->" needs a line "<!-- end -->" of its own')
    for found in MAKES.finditer(text):
        output(found["words"])
    return SHOWS.sub(lambda found: f"{found[1]}\n{output(found['words'])}\n{found[3]}", text)


def output(words: str) -> str:
    """What a command prints, without the white space at its end."""
    name, *arguments = shlex.split(words)
    if name != "mixassay":
        raise UserError(f'a document may run mixassay only, not "{words}"')
    done = subprocess.run([sys.executable, "-P", "-m", "mixassay", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{words} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout.rstrip()


def main() -> None:
    for name in sys.argv[1:]:
        path = Path(name)
        try:
            path.write_text(refreshed(path.read_text()))
        except (OSError, UserError) as problem:
            sys.exit(f"{path}: {problem}")


if __name__ == "__main__":
    main()
