"""docs/tasks.md shows rows as the tasks give them, and has a section on every task."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tasks.md").read_text()


def test_the_examples_are_what_the_tasks_give() -> None:
    """All Python blocks run one after another, and each prints the text block behind it."""
    names: dict[str, Any] = {}
    shown = 0
    for code, expected in re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", PAGE, re.S):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == expected, code
        shown += bool(expected)
    assert shown >= 14


def test_every_task_has_its_section() -> None:
    tasks = {path.stem for path in (ROOT / "tasks").glob("[!_]*.py")}
    headings = set(re.findall(r"^##+ (\w+)", PAGE, re.M))
    assert tasks <= {heading.lower() for heading in headings}
