"""docs/cli.md is what `--help` says."""

from pathlib import Path

from mixassay.runners.cli import manual

PAGE = Path(__file__).parents[2] / "docs/cli.md"


def test_the_manual_is_current() -> None:
    assert PAGE.read_text() == manual.text(), "write it anew: python -P -m mixassay.runners.cli.manual > docs/cli.md"


def test_the_manual_has_all_verbs() -> None:
    text = manual.text()
    for verb in (
        "run",
        "report",
        "audit-bias",
        "list",
        "show",
        "validate",
        "schema",
        "doctor",
        "bench data",
        "bench kernels",
        "bench decode",
    ):
        assert f"\n## mixassay {verb}\n" in text
