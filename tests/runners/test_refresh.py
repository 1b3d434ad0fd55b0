"""A document's tables are what its commands print now, and all else in it stays."""

from importlib.metadata import version
from pathlib import Path

import pytest

from mixassay.errors import UserError
from mixassay.runners.refresh import refreshed

DOCUMENT = """\
# A report

<!-- shows: mixassay --version -->
{}
<!-- end -->
What it means.
"""


def test_what_a_command_prints_stands_in_its_place() -> None:
    said = DOCUMENT.format(f"mixassay {version('mixassay')}")
    assert refreshed(DOCUMENT.format("old\n\n| table |")) == said
    assert refreshed(DOCUMENT.replace("{}\n", "")) == said


def test_what_cannot_be_run_is_told(tmp_path: Path) -> None:
    for document, fault in (
        ("<!-- shows: mixassay --version -->\n", "needs a line"),
        ("<!-- shows: mixassay --version -->\n<!-- shows: mixassay --version -->\n<!-- end -->\n", "needs a line"),
        ("<!-- shows: rm -r x -->\n<!-- end -->\n", "mixassay only"),
        (f"<!-- makes: mixassay report {tmp_path}/none.yaml -->\n", r"none\.yaml ended with 2: .*none\.yaml"),
    ):
        with pytest.raises(UserError, match=fault):
            refreshed(document)
