"""Lines that come again: every scored value was told before, and samples of any length are whole lines."""

import pytest
import torch

from mixassay.tasks import IGNORE
from mixassay.tasks.lm import recall
from mixassay.tasks.lm.parts import Part
from mixassay.tasks.lm.samples import RECALL, Sampler
from mixassay.tasks.ruler.chance import Chance
from mixassay.tasks.ruler.generate import LEAST_LENGTH
from mixassay.tasks.text import Text
from mixassay.tokens import Bytes


class Threes(Bytes):
    """Three bytes a token, from wherever a text begins."""

    end = 0

    def encode(self, text):
        data = text.encode()
        return [int.from_bytes(data[i : i + 3], "big") for i in range(0, len(data), 3)]

    def decode(self, ids, /):
        return b"".join(i.to_bytes(3, "big").lstrip(b"\0") for i in ids if i != self.end).decode()


TOKENIZERS = [Bytes(), Threes()]


def sample(length, tokenizer=TOKENIZERS[0], index=0, seed=7):
    return Sampler((RECALL,), tokenizer, "", 1.0).marked(seed, index, length)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("length", [LEAST_LENGTH, 257, 300, 1023, 4096])
def test_values_that_are_asked_for_were_told(length, tokenizer):
    for index in range(8):
        ids, parts = sample(length, tokenizer, index)
        assert length - 80 < len(ids) == len(parts) <= length
        assert ids[-1] == tokenizer.end
        assert parts[-1] == Part.TOLD
        lines = tokenizer.decode(ids).splitlines(keepends=True)
        told, at = {}, 0
        for number, line in enumerate(lines):
            key, value = line.split(":")
            kinds = (Part.ASKED, Part.ANSWER) if number % 2 else (Part.TOLD, Part.TOLD)
            for text, kind in zip((f"{key}:", value), kinds, strict=True):
                piece = tokenizer.encode(text)
                assert ids[at : at + len(piece)] == piece, "the same tokens wherever it stands"
                assert parts[at : at + len(piece)] == [kind] * len(piece)
                at += len(piece)
            assert (key in told) == bool(number % 2)
            assert told.setdefault(key, value) == value
        assert at == len(ids) - 1
        assert len(set(told.values())) == len(told) == (len(lines) + 1) // 2
        assert len(lines) >= 2


def test_values_are_numbers_or_words_in_a_sample():
    numbers = 0
    for index in range(40):
        values = {content[0] for _, content in recall.lines(Chance(0, index, "test"), 9)}
        kinds = {value.strip().isdigit() for value in values}
        assert len(kinds) == 1
        numbers += kinds.pop()
    assert 10 <= numbers <= 30


def test_samples_are_a_pure_function():
    assert sample(1024, index=3) == sample(1024, index=3)
    others = [sample(1024), sample(1024, index=1), sample(1024, seed=8), sample(1025)]
    assert len({tuple(ids) for ids, _ in others}) == 4


@pytest.mark.parametrize("told", [1, 2, 3, 4, 5, 8, 9, 600])
def test_windows_double_up_to_all_that_was_told(told):
    words = range(0, 2**recall.WORD, 2 ** (recall.WORD - 8))
    found = [recall.window(told, word) for word in words]
    doubles = [2**k for k in range(1, 11) if 2**k < told]
    assert sorted(set(found)) == [*doubles, told]
    each = [found.count(size) for size in set(found)]
    assert max(each) - min(each) <= 1, "equally likely"
    assert recall.window(told, 2**recall.WORD - 1) == told


def test_lines_come_again_from_all_that_was_told():
    """Of the last 40 of 80 lines, half come from the last few and some from the beginning."""
    back = []
    for index in range(40):
        keys = [line[0][0] for line in recall.lines(Chance(0, index, "test"), 80)]
        back += [i - keys[::2].index(keys[2 * i + 1]) for i in range(40, 80)]
    assert min(back) == 0
    assert 64 <= max(back) < 80
    assert 0.45 < sum(b < 8 for b in back) / len(back) < 0.75


def test_what_is_scored_in_rows_of_them(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("".join(f"{n} bottles of beer on the wall.\n" for n in range(900)))
    args = {"files": (str(file),), "tokenizer": "bytes", "seq_len": 700, "samples": (RECALL,), "lengths": (300,)}
    of = {}
    for loss in ("answers", "questions", "all"):
        rows = Text(**args, loss=loss, rows_of="samples").rows(torch.arange(3), seed=0, split="valid")
        of[loss] = [Bytes().decode(y[y != IGNORE].tolist()) for y in rows.labels]
    for answers, questions, whole in zip(*of.values(), strict=True):
        values = answers.splitlines()
        assert all(value[0] == " " and value[1:] in whole for value in values)
        again = questions.splitlines()
        assert [line.partition(":")[2] for line in again] == values
        assert all(line in whole for line in again)
        assert 0 <= whole.count("\n") - 2 * len(values) <= 2, "one more where a sample ends behind a line that tells"
