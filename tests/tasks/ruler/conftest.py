"""Tokenizers and question files for the RULER tests; data that is not in the repository is skipped with a reason."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from mixassay.tasks.ruler.sources import Sources

ROOT = Path(__file__).parents[3]
DATA = Path(os.environ.get("MIXASSAY_DATA", ROOT.parent / "shared/data"))


class WordTokenizer:
    """A token a word or sign, and one that begins the sequence."""

    identity = "words"
    special = 1

    def count(self, text: str) -> int:
        return len(re.findall(r"\w+|[^\w\s]", text))


@pytest.fixture
def words() -> WordTokenizer:
    return WordTokenizer()


@pytest.fixture(scope="session")
def data() -> Path:
    """Golden samples, tokenizers and question files: MIXASSAY_DATA, or shared/data beside the checkout."""
    if not DATA.is_dir():
        pytest.skip(f"no data at {DATA}; set MIXASSAY_DATA")
    return DATA


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Questions made by hand: 12 articles of 30 paragraphs, 60 items of 10 documents."""
    folder = tmp_path_factory.mktemp("questions")

    def filler(name: str) -> str:
        return f"This is the paragraph of {name}. " + "It says little more than that. " * (1 + len(name) % 5)

    def qa(i: int, j: int) -> list[dict[str, Any]]:
        found = {"question": f"What is said of topic {i}-{j}?", "answers": [{"text": f"topic {i}-{j}"}, {"text": "it"}]}
        return [found, {**found, "question": "What is not said?", "answers": [], "is_impossible": True}]

    articles = [
        {"paragraphs": [{"context": filler(f"topic {i}-{j}"), "qas": qa(i, j)} for j in range(30)]} for i in range(12)
    ]
    items = [
        {
            "question": f"Which one is item {i}?",
            "answer": f"item {i}",
            "context": [[f"Title {i}-{j}", [filler(f"item {i}-{j}"), " More."]] for j in range(10)],
            "supporting_facts": [[f"Title {i}-7", 0], [f"Title {i}-2", 0], [f"Title {i}-2", 1]],
        }
        for i in range(60)
    ]
    (folder / "squad.json").write_text(json.dumps({"data": articles}))
    (folder / "hotpotqa.json").write_text(json.dumps(items))
    return Sources(squad=folder / "squad.json", hotpotqa=folder / "hotpotqa.json")
