"""docs/tasks.md has a section on every task. That its rows are what the tasks give: `tests/test_docs.py`."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tasks.md").read_text()


def test_every_task_has_its_section() -> None:
    tasks = {path.stem for path in (ROOT / "tasks").glob("[!_]*.py")}
    headings = set(re.findall(r"^##+ (\w+)", PAGE, re.M))
    assert tasks <= {heading.lower() for heading in headings}
