"""Text from local files, for language models: every position predicts the next token, and some rows are samples.

    text row     a window of the training text, anywhere in it                  every position is scored
    sample row   samples of one length packed one after another, then text      their answers are scored

Windows cross the ends of files; there the tokenizer's end of a text stands. A sample's state is not reset before the
next one in its row: they are texts of one stream, as in any packed training of language models.
"""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mixassay import corpus, draws
from mixassay.corpus import HELD_OUT, Split
from mixassay.errors import UserError
from mixassay.tasks import IGNORE, Rows, task
from mixassay.tasks.lm.parts import Part
from mixassay.tasks.lm.samples import Sampler, check, seed_of
from mixassay.tokens import Tokenizer

PACKED = 64
"""Samples of one row at most: number j of row i is sample 64 i + j."""

SCORED = {"answers": Part.ANSWER, "questions": Part.ASKED, "all": Part.TOLD}
"""The least that is scored."""


@task("text")
@dataclass(frozen=True, kw_only=True)
class Text:
    """Rows of `seq_len` tokens.

    files      text files, folders of which every .txt file is read, or "moby_dick" and "on_liberty", which are shipped;
               their hash is part of a run's record
    tokenizer  "bytes", the path of a tokenizer.json, or "bpe-4096": a BPE built from the training text
    held_out   share of every file, at its end, for validation, and as much for tests
    samples    "recall" (`tasks/lm/recall.py`) and RULER tasks (all but the two of questions and answers), of which one
               is drawn for each sample
    share      of the rows that hold samples, where there are any
    lengths    in tokens, one is drawn for a row: it packs seq_len // length samples; () = seq_len alone
    loss       what is scored in sample rows: "answers", each with the end behind it; "questions" besides, which repeat
               keys of the text and so teach to copy; or "all" tokens
    rows_of    "both", or only "text" or only "samples": for evaluation cells

    Training windows begin anywhere. Row i of validation and test text begins at token i seq_len of what is held out,
    so no token is scored twice; UserError beyond its end. Samples draw needles of their own for each seed and split,
    and their prose is cut out of the split's own part of the files.

    Rows: positions are all, labels the next tokens. Slice "bytes" [N], where no row holds samples: of the labels' text.
    """

    version: ClassVar[int] = 1

    files: tuple[str, ...]
    tokenizer: str
    seq_len: int = 1024
    held_out: float = HELD_OUT
    samples: tuple[str, ...] = ()
    share: float = 0.5
    lengths: tuple[int, ...] = ()
    loss: Literal["answers", "questions", "all"] = "answers"
    rows_of: Literal["both", "text", "samples"] = "both"

    def __post_init__(self) -> None:
        if not self.files:
            raise UserError("text: files is empty: name text files, or folders of them")
        if self.seq_len < 2:
            raise UserError(f"text: seq_len must be at least 2, got {self.seq_len}")
        if not 0 < self.held_out < 0.5:
            raise UserError(f"text: held_out must be between 0 and 0.5, got {self.held_out}")
        if not 0 <= self.share <= 1:
            raise UserError(f"text: share must be from 0 to 1, got {self.share}")
        if self.rows_of == "samples" and not self.samples:
            raise UserError("text: rows_of: samples needs samples, e.g. names of RULER tasks")
        check(self.samples, self.lengths, self.seq_len)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    def rows(self, index: Tensor, *, seed: int | Tensor, split: Split) -> Rows:
        """Rows `index` int64 [N] of the split (see `Task`). Made on the CPU, wherever they are wanted."""
        on, index = index.device, index.cpu()
        if self._share:
            self._sampler(split)  # complains of samples that do not fit, and not when the first of them is drawn
        seeds = [seed] * len(index) if isinstance(seed, int) else seed.tolist()
        made = [self._row(i, its, split) for i, its in zip(index.tolist(), seeds, strict=True)]
        ids, scored = (torch.stack(x) for x in zip(*made, strict=True))
        tokens, labels = ids[:, :-1], ids[:, 1:].masked_fill(~scored, IGNORE)
        positions = torch.arange(self.seq_len).expand_as(labels).masked_fill(labels == IGNORE, 0)
        slices = {"bytes": self._bytes(ids[:, 1:])} if self._share == 0 else {}
        return Rows(tokens, positions, labels, slices).map(lambda x: x.to(on))

    def _row(self, index: int, seed: int, split: Split) -> tuple[Tensor, Tensor]:
        """seq_len + 1 ids, and whether the model is scored on predicting each but the first."""
        words = draws.bits(seed, torch.tensor([index]), self._stream(split), 4)
        which, length, start, _ = words[0].tolist()
        T, stream = self.seq_len, self._ids(split)
        last = len(stream) - T - 1
        if last < 0:
            raise UserError(
                f"text: seq_len: the {split} text has {len(stream)} tokens, fewer than seq_len + 1 = {T + 1}"
            )
        sampled = which < round(self._share * 2**32)
        if split == "train" or sampled:
            at = start * (last + 1) >> 32
        else:
            at = index * T
            if at > last:
                raise UserError(
                    f"text: {split}_examples: row {index} is asked for, and the {split} text has {last // T + 1} rows "
                    f"of {T} tokens"
                )
        ids, scored = stream[at : at + T + 1].long(), torch.ones(T, dtype=torch.bool)
        if sampled:
            ids, scored = ids.clone(), torch.zeros(T, dtype=torch.bool)
            self._pack(ids, scored, index, seed_of(seed, split), length, split)
        return ids, scored

    def _pack(self, ids: Tensor, scored: Tensor, index: int, seed: int, word: int, split: Split) -> None:
        """Samples over the beginning of a row of text."""
        length = self._lengths[word * len(self._lengths) >> 32]
        at = 0
        for j in range(min(PACKED, self.seq_len // length)):
            sample, parts = self._sampler(split).marked(seed, PACKED * index + j, length)
            ids[at : at + len(sample)] = torch.tensor(sample)
            scored[at : at + len(sample) - 1] = torch.tensor(parts[1:]) >= SCORED[self.loss]
            at += len(sample)

    def _bytes(self, labels: Tensor) -> Tensor:
        """A character that the end of a row cuts counts there, as the 3 bytes of U+FFFD, and not in the next row."""
        texts = [self._tokenizer.decode(row) for row in labels.tolist()]
        return torch.tensor([len(text.lstrip("\ufffd").encode()) for text in texts])

    @property
    def _share(self) -> float:
        return {"both": self.share if self.samples else 0.0, "text": 0.0, "samples": 1.0}[self.rows_of]

    @property
    def _lengths(self) -> tuple[int, ...]:
        return self.lengths or (self.seq_len,)

    def _stream(self, split: Split) -> int:
        return draws.stream("text", self.version, split)

    # What is read and made once for all rows, and all tasks of the same text.

    @property
    def _tokenizer(self) -> Tokenizer:
        return corpus.tokenizer(self.tokenizer, self.files, self.held_out)

    def _ids(self, split: Split) -> Tensor:
        return encoded(self.files, self.held_out, self.tokenizer, split)

    def _sampler(self, split: Split) -> Sampler:
        return sampler(self.samples, self._lengths, self.files, self.held_out, self.tokenizer, split)


@cache
def encoded(files: tuple[str, ...], held_out: float, tokenizer: str, split: Split) -> Tensor:
    """A split's part of all files, an end of text behind each: int32 [tokens]."""
    words = corpus.tokenizer(tokenizer, files, held_out)
    parts = corpus.read(files, held_out).part(split)
    return torch.cat([torch.tensor([*words.encode(text), words.end], dtype=torch.int32) for text in parts])


@cache
def sampler(
    names: tuple[str, ...],
    lengths: tuple[int, ...],
    files: tuple[str, ...],
    held_out: float,
    tokenizer: str,
    split: Split,
) -> Sampler:
    prose = "\n".join(corpus.read(files, held_out).part(split))
    per_token = len(prose) / len(encoded(files, held_out, tokenizer, split))
    made = Sampler(names, corpus.tokenizer(tokenizer, files, held_out), prose, per_token)
    made.try_all(lengths)
    return made
