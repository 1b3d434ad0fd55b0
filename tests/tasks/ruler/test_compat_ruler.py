"""compat ruler against rows that NVIDIA/RULER's own scripts wrote (seed 42, SmolLM2's tokenizer)."""

import json
from pathlib import Path

import pytest

from mixassay.errors import UserError
from mixassay.tasks.ruler.compat.ruler import PublicRuler
from mixassay.tasks.ruler.sources import Sources
from mixassay.tasks.ruler.table import TASKS
from mixassay.tokens import Bytes, HuggingFace

CASES = [(task, length) for task in TASKS for length in (1024, 4096) if not (task.startswith("qa") and length == 1024)]


@pytest.fixture(scope="module")
def smollm2(data: Path) -> HuggingFace:
    pytest.importorskip("tokenizers")
    return HuggingFace(data / "tokenizers/smollm2-135m")


def questions(data: Path) -> Sources:
    return Sources(squad=data / "squad/xquad.en.json", hotpotqa=data / "hotpotqa/hotpot_dev_distractor_sample100.json")


@pytest.mark.parametrize(("task", "length"), CASES, ids=str)
def test_every_golden_row_comes_out_byte_for_byte(task: str, length: int, data: Path, smollm2: HuggingFace) -> None:
    rows = [json.loads(line) for line in (data / f"ruler/samples/{length}/{task}.jsonl").read_text().splitlines()]
    assert len(rows) == (10 if length == 1024 else 5)
    made = list(PublicRuler(task, length, smollm2, questions(data)).samples(len(rows)))
    for row, sample in zip(rows, made, strict=True):
        assert sample.input == row["input"]
        assert sample.prefix == row["answer_prefix"]
        assert list(sample.answers) == row["outputs"]
        assert sample.prompt_tokens + sample.new_tokens == row["length"]


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_3"])
def test_the_needle_is_where_the_golden_rows_say(task: str, data: Path, smollm2: HuggingFace) -> None:
    """They count to the answer, we to the sentence that holds it."""
    rows = [json.loads(line) for line in (data / f"ruler/samples/4096/{task}.jsonl").read_text().splitlines()]
    for row, sample in zip(rows, PublicRuler(task, 4096, smollm2).samples(5), strict=True):
        assert 8 < row["token_position_answer"] - sample.positions[0] < 50


@pytest.mark.parametrize(
    ("task", "length"),
    [("qa_1", 512), ("qa_2", 1024), ("vt", 512), ("niah_multikey_3", 512), ("fwe", 256), ("cwe", 512)],
)
def test_where_the_public_code_would_hang_it_says_so(task: str, length: int, small: Sources) -> None:
    with pytest.raises(UserError, match="never ends here"):
        list(PublicRuler(task, length, Bytes(), small).samples(1))


def test_more_questions_than_there_are(small: Sources) -> None:
    with pytest.raises(UserError, match=r"hotpotqa\.json has 60 questions, not 61"):
        list(PublicRuler("qa_2", 8192, Bytes(), small).samples(61))
