"""compat lm-eval against what the stock tasks of lm-evaluation-harness 0.4.13 made."""

import hashlib
from pathlib import Path

import pytest

from mixassay.errors import UserError
from mixassay.tasks.ruler.compat.lm_eval import PublicLmEval
from mixassay.tasks.ruler.generate import Ruler
from mixassay.tasks.ruler.scores import score
from mixassay.tasks.ruler.sources import Sources
from mixassay.tokens import Bytes, HuggingFace

STOCK = {
    ("niah_single_1", 1024): "02c5474c00c26333",
    ("niah_single_2", 1024): "fdc224a478b1170b",
    ("niah_single_3", 1024): "1c52ac160e634285",
    ("niah_multikey_1", 1024): "53b6d5b3f09b5b01",
    ("niah_multikey_2", 1024): "6062de7c2a7bc044",
    ("niah_multikey_3", 1024): "f2d4c2fe276a79e5",
    ("niah_multivalue", 1024): "c2e20f2562c29690",
    ("niah_multiquery", 1024): "a59bf21687402c38",
    ("vt", 1024): "919200720e7264ae",
    ("cwe", 1024): "e4c4f72d3c70aa78",
    ("fwe", 1024): "e320776dc2732954",
    ("qa_1", 1024): "0e3ce3d48e3511c8",
    ("niah_single_1", 4096): "723948a02d47f3c2",
    ("niah_single_2", 4096): "0b35881e3e732ad7",
    ("niah_single_3", 4096): "df059618beb7f266",
    ("niah_multikey_1", 4096): "ef9a20994302058b",
    ("niah_multikey_2", 4096): "14e2a519cc0b2f68",
    ("niah_multikey_3", 4096): "c0768b17f622ad07",
    ("niah_multivalue", 4096): "e31f5276c2873ec3",
    ("niah_multiquery", 4096): "3326738cfdece1c6",
    ("vt", 4096): "e2638ded4cdba8da",
    ("cwe", 4096): "66e6527c07329948",
    ("fwe", 4096): "dc72b2caf0292085",
    ("qa_1", 4096): "852ff7721ca1931c",
    ("qa_2", 4096): "a0244b2f42727dff",
}
"""sha256 of six samples of each stock task (index, prompt, outputs), from random seed 0 and numpy seed 1234, SmolLM2's
tokenizer, On Liberty and Moby-Dick as the essays and nltk's sentences, xquad and the HotpotQA sample as questions."""


@pytest.fixture(scope="module")
def smollm2(data: Path) -> HuggingFace:
    pytest.importorskip("tokenizers")
    return HuggingFace(data / "tokenizers/smollm2-135m")


def questions(data: Path) -> Sources:
    return Sources(squad=data / "squad/xquad.en.json", hotpotqa=data / "hotpotqa/hotpot_dev_distractor_sample100.json")


@pytest.mark.parametrize(("task", "length"), STOCK, ids=str)
def test_samples_are_the_stock_tasks(task: str, length: int, data: Path, smollm2: HuggingFace) -> None:
    whole = hashlib.sha256()
    for sample in PublicLmEval(task, length, smollm2, questions(data)).samples(6):
        whole.update(repr((sample.index, sample.prompt, list(sample.answers))).encode())
    assert whole.hexdigest()[:16] == STOCK[task, length]


@pytest.mark.parametrize(
    ("task", "length", "low", "high"),
    [
        ("niah_multikey_3", 4096, 0.56, 0.58),  # half the distractors are missing
        ("cwe", 4096, 0.66, 0.71),  # the example is missing
        ("niah_single_2", 512, 0.41, 0.43),  # no haystack is left
        ("fwe", 1024, 1.0, 1.05),  # over the length
    ],
)
def test_its_fill_is_what_was_measured_and_ours_is_full(
    task: str, length: int, low: float, high: float, smollm2: HuggingFace
) -> None:
    public = [sample.fill for sample in PublicLmEval(task, length, smollm2).samples(4)]
    assert low <= min(public) <= max(public) <= high
    assert all(0.97 <= sample.fill <= 1 for sample in Ruler(task, length, smollm2).samples(4))


def test_it_scores_the_share_of_the_references() -> None:
    answers = ["Denver, Colorado", "the city of Denver", "Denver"]
    assert score("qa_1", "Denver", answers, compat="lm-eval") == pytest.approx(1 / 3)
    assert score("qa_1", "Denver", answers, compat="ruler") == score("qa_1", "Denver", answers) == 1


def test_samples_that_do_not_fit_are_dropped_and_keep_their_numbers(small: Sources) -> None:
    made = [sample.index for sample in PublicLmEval("qa_2", 2300, Bytes(), small).samples(60)]
    assert 0 < len(made) < 60
    assert made == sorted(set(made))
    with pytest.raises(UserError, match="none of the samples fit"):
        list(PublicLmEval("qa_2", 1024, Bytes(), small).samples(60))


@pytest.mark.parametrize(
    ("task", "length", "message"),
    [
        ("vt", 1024, "never ends here"),
        ("fwe", 256, "never ends here"),
        ("qa_1", 65536, "mixes its documents up"),
    ],
)
def test_where_the_stock_task_hangs_or_fails_it_says_so(task: str, length: int, message: str, small: Sources) -> None:
    with pytest.raises(UserError, match=message):
        list(PublicLmEval(task, length, Bytes(), small).samples(1))


def test_an_empty_list_is_refused(smollm2: HuggingFace) -> None:
    with pytest.raises(UserError, match="makes an empty list here"):
        list(PublicLmEval("cwe", 512, smollm2).samples(1))


def test_prose_that_is_too_short_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Some words. " * 100)
    with pytest.raises(UserError, match="the prose has 200 words; give a longer one"):
        list(PublicLmEval("niah_single_2", 4096, Bytes(), Sources(essay=(tmp_path / "short.txt",))).samples(1))


@pytest.mark.parametrize("task", ["niah_single_1", "fwe"])
def test_a_tokenizer_that_counts_nothing_is_an_error(task: str) -> None:
    class Empty(Bytes):
        def count(self, text: str) -> int:
            return 0

    with pytest.raises(UserError, match="counts almost nothing"):
        list(PublicLmEval(task, 256, Empty()).samples(1))
