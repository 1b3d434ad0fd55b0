"""Rows of text: windows of what was asked for, samples that hold their answers, and nothing of one split in another."""

import pytest
import torch

from mixassay import corpus, tokens
from mixassay.errors import UserError
from mixassay.tasks import IGNORE
from mixassay.tasks.lm.parts import Part
from mixassay.tasks.lm.samples import NAMES, RECALL, Sampler, seed_of
from mixassay.tasks.ruler.generate import Ruler
from mixassay.tasks.text import Text
from mixassay.tokens import Bytes

WORDS = ["tide", "lamp", "crow", "moss", "bell", "reed", "salt", "wren", "Ash", "oak"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two files of lines that are all different."""
    folder = tmp_path_factory.mktemp("text")
    for name, start in (("a.txt", 0), ("b.txt", 5000)):
        lines = [f"{WORDS[i % 10]} {WORDS[i * 7 // 3 % 10]} is {i}.\n" for i in range(start, start + 3000)]
        (folder / name).write_text("".join(lines))
    (folder / "notes.md").write_text("not a text")
    return (str(folder),)


def task(files, **more):
    return Text(files=files, tokenizer="bytes", **{"seq_len": 64, **more})


def test_the_parts_of_a_file_are_the_file_and_its_lines_are_whole(files):
    read = corpus.read(files, 0.1)
    assert read.names == ("a.txt", "b.txt")
    for text, *parts in zip(read.texts, *(read.part(split) for split in ("train", "valid", "test")), strict=True):
        assert "".join(parts) == text
        assert all(part.endswith("\n") for part in parts)
        assert [round(len(part) / len(text), 2) for part in parts] == [0.8, 0.1, 0.1]


def test_the_hash_is_of_what_files_hold(files, tmp_path):
    whole = corpus.read(files, 0.1)
    for name, text in zip(("x.txt", "y.txt"), whole.texts, strict=True):
        (tmp_path / name).write_text(text)
    assert corpus.read((str(tmp_path),), 0.1).sha256 == whole.sha256
    assert corpus.read((str(tmp_path / "x.txt"),), 0.1).sha256 != whole.sha256
    assert corpus.read(("moby_dick",), 0.1).texts[0].startswith("Call me Ishmael.")


@pytest.mark.parametrize(
    ("name", "said"), [("none.txt", "cannot read"), (".", "no .txt file"), ("bad.txt", "no UTF-8")]
)
def test_files_that_cannot_be_read(name, said, tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    target = tmp_path / "empty" if name == "." else tmp_path / name
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=said):
        corpus.read((str(target),), 0.1)


def test_training_windows_stand_in_the_training_text(files):
    rows = task(files).rows(torch.arange(20), seed=3, split="train")
    text = "\0".join(corpus.read(files, corpus.HELD_OUT).part("train")) + "\0"
    for ids, labels in zip(rows.tokens.tolist(), rows.labels.tolist(), strict=True):
        window = "".join("\0" if i == Bytes.end else chr(i) for i in [*ids, labels[-1]])
        assert window in text
        assert ids[1:] == labels[:-1]
    assert rows.positions.tolist() == [list(range(64))] * 20
    assert len({tuple(ids) for ids in rows.tokens.tolist()}) == 20


@pytest.mark.parametrize("split", ["valid", "test"])
def test_evaluation_rows_tile_what_is_held_out(files, split):
    text = task(files)
    held = "".join(corpus.read(files, corpus.HELD_OUT).part(split))
    n = len(held) // 64 - 1
    rows = text.rows(torch.arange(n), seed=0, split=split)
    assert Bytes().decode(rows.tokens.flatten().tolist()) == held[: 64 * n - (Bytes.end in rows.tokens)]
    assert rows.slices["bytes"].sum() == (rows.labels != Bytes.end).sum()
    with pytest.raises(UserError, match="rows of 64 tokens"):
        text.rows(torch.tensor([n + 5]), seed=0, split=split)


@pytest.mark.parametrize("seq_len", [64, 65])
def test_characters_that_the_end_of_a_row_cuts_are_counted_once(seq_len, tmp_path):
    (tmp_path / "a.txt").write_text("日本語のテキスト。これは文です。\n" * 400, encoding="utf-8")
    rows = task((str(tmp_path),), held_out=0.2, seq_len=seq_len).rows(torch.arange(30), seed=0, split="valid")
    assert abs(rows.slices["bytes"].sum() - 30 * seq_len) <= 2, "but for the ends of the first and the last row"


SAMPLED = {"seq_len": 2200, "samples": ("niah_single_2", "niah_multivalue"), "lengths": (730, 1100)}


def test_rows_are_a_pure_function(files):
    text = task(files, **SAMPLED)
    some = text.rows(torch.tensor([5, 2, 9]), seed=torch.tensor([1, 1, 2]), split="train")
    for k, (index, seed) in enumerate([(5, 1), (2, 1), (9, 2)]):
        alone = text.rows(torch.tensor([index]), seed=seed, split="train")
        assert torch.equal(alone.tokens[0], some.tokens[k])
        assert torch.equal(alone.targets()[0], some.targets()[k])
    other = text.rows(torch.tensor([5]), seed=2, split="train")
    assert not torch.equal(other.tokens[0], some.tokens[0])


def test_sample_rows_ask_for_what_they_hold(files):
    """Every scored stretch is an answer and the end of a text, and its values stand earlier in the row."""
    text = task(files, rows_of="samples", held_out=0.2, **SAMPLED)
    rows = text.rows(torch.arange(6), seed=0, split="valid")
    packed = set()
    for ids, labels in zip(rows.tokens, rows.labels, strict=True):
        scored = (labels != IGNORE).nonzero().flatten().tolist()
        answers = Bytes().decode(labels[scored].tolist()).removesuffix(".").split(". ")
        packed.add(len(answers))
        assert int((labels == Bytes.end).sum()) == len(answers)
        for answer in answers:
            for value in answer.replace(" ", "").rstrip(".").split(","):
                start = bytes(ids.clamp(max=255).tolist()).decode(errors="replace").index(f"is: {value}.")
                assert start < scored[0] or len(answers) > 1
    assert packed == {2, 3}, "of 1100 and of 730 tokens"


def test_what_is_scored_in_sample_rows(files):
    """The answers, they with their questions, or everything, of the same rows."""
    kinds = ("answers", "questions", "all")
    answers, questions, whole = (
        task(files, rows_of="samples", loss=loss, **SAMPLED).rows(torch.arange(2), seed=0, split="train")
        for loss in kinds
    )
    assert torch.equal(answers.tokens, questions.tokens)
    assert torch.equal(answers.tokens, whole.tokens)
    few, some, many = (rows.labels != IGNORE for rows in (answers, questions, whole))
    assert (some | ~few).all()
    assert (many | ~some).all()
    asked = Bytes().decode(questions.labels[0][some[0]].tolist())
    assert asked.startswith("\nWhat ")
    assert asked.count("\nWhat ") == int((answers.labels[0] == Bytes.end).sum())
    assert 3 * few.sum() < some.sum() < many.sum() / 3


@pytest.mark.parametrize("name", NAMES)
def test_samples_of_all_tasks_fit_their_length(name, files):
    prose = corpus.read(files, 0.05).part("train")[0]
    for index in range(2):
        ids, parts = Sampler((name,), Bytes(), prose, 1.0).marked(7, index, 2500)
        assert len(ids) == len(parts) <= 2500
        assert ids[-1] == Bytes.end
        if name != RECALL:
            assert parts == sorted(parts)
            assert set(parts) == set(Part)
            asked = bytes(i for i, part in zip(ids, parts, strict=True) if part == Part.ASKED)
            assert b"?" in asked or name in ("vt", "fwe")


def test_a_length_that_a_task_does_not_fit_is_told_at_the_first_row(files):
    text = task(files, seq_len=1100, samples=("niah_single_1", "niah_multiquery"), lengths=(1100, 640))
    with pytest.raises(UserError, match="niah_multiquery at length 640: the smallest prompt"):
        text.rows(torch.arange(8), seed=0, split="train")


def test_several_values_of_a_key_are_answered_in_the_order_of_the_text(files):
    prose = corpus.read(files, 0.05).part("train")[0]
    ids, parts = Sampler(("niah_multivalue",), Bytes(), prose, 1.0).marked(7, 3, 1500)
    prompt = parts.index(Part.ANSWER)
    asked, answer = Bytes().decode(ids[:prompt]), Bytes().decode(ids[prompt:])
    places = [asked.index(value) for value in answer.strip(" .").split(", ")]
    assert len(places) == 4
    assert places == sorted(places)


def test_training_samples_are_none_of_the_evaluated_ones(files):
    text = task(files, rows_of="samples", seq_len=1100, samples=("niah_single_1",))
    shown = text.rows(torch.arange(20), seed=42, split="train").tokens
    prompts = [Bytes().decode(ids) for ids in shown.tolist()]
    evaluated = Ruler("niah_single_1", 1100, Bytes())
    for sample in evaluated.samples(20):
        assert not any(sample.answers[0] in prompt for prompt in prompts)
    assert seed_of(42, "train") != seed_of(42, "valid") != 42


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"files": ()}, "files is empty"),
        ({"seq_len": 1}, "seq_len"),
        ({"held_out": 0.5}, "held_out"),
        ({"share": 1.5}, "share"),
        ({"samples": ("niah_singel_1",)}, 'Did you mean "niah_single_1"'),
        ({"samples": ("qa_1",)}, "unknown sample"),
        ({"lengths": (100,)}, "lengths must be from 256"),
        ({"lengths": (4096,)}, "to seq_len=64"),
        ({"rows_of": "samples"}, "needs samples"),
    ],
)
def test_what_cannot_be_generated_is_told(files, wrong, said):
    with pytest.raises(UserError, match=said):
        task(files, **wrong) if "files" not in wrong else task(**wrong)


@pytest.fixture
def bpe(files, tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return corpus.built(corpus.read(files, 0.05), "bpe-290")


def test_a_bpe_is_the_same_for_the_same_text(files, bpe, monkeypatch):
    monkeypatch.setenv("RAYON_NUM_THREADS", "2")
    again = corpus.bpe(corpus.read(files, 0.05).part("train"), 290)
    assert bpe.read_text() == again
    assert corpus.built(corpus.read(files, 0.05), "bpe-290") == bpe, "read from the cache"
    assert corpus.built(corpus.read(files, 0.05), "bpe-280") != bpe


def test_a_bpe_gives_every_text_back_and_every_digit_a_token(bpe):
    words = tokens.load(bpe)
    text = "A crow is 12345 — naïve\n\n  wren\t"
    ids = words.encode(text)
    assert words.decode(ids) == text
    assert words.vocab_size == 290
    assert words.end == 0
    assert len(words.encode("12345")) == 5
    assert len(words.encode("crow")) < 4


@pytest.mark.parametrize("name", ["bpe-", "bpe-x", "bpe-257", "bpe-99999"])
def test_sizes_of_a_bpe(name, files):
    with pytest.raises(UserError, match="bpe-N with N from 258"):
        corpus.built(corpus.read(files, 0.05), name)
