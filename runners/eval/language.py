"""A model of ours as a language model: it goes on from prompts, and says how likely texts are.

Prompts of nearly one length are read together up to the length of the shortest, in one call (`Model.prefill`), of which
the last position's logits are kept alone. Every further token is one step: of what is left of a longer prompt, or
written. Rows whose states have one shape take their steps together: of a recurrent mixer all rows, of attention those
that were read together. No row is ever padded, so that what a model answers does not depend on its neighbours, and a
batch that does not fit in memory can be halved.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mixassay.errors import UserError
from mixassay.kernels.common.precision import cast
from mixassay.mixers import nbytes
from mixassay.model import Decoding, Model, scores
from mixassay.runners.eval.steps import Steps
from mixassay.runners.memory import in_batches
from mixassay.tokens import Tokenizer

Precision = Literal["fp32", "bf16", "fp64"]
READ_AT_ONCE = 2**17
"""Tokens of prompts in one call, unless a single prompt is longer."""
NEAR = 48
"""Tokens by which the lengths of prompts that are read together may differ: so many steps cost less than a call."""
IGNORE = -100
NOT_A_NUMBER = -1


@dataclass(frozen=True)
class Wanted:
    """A prompt to go on from, greedily: at most `new_tokens`, and nothing from one of the texts in `stop` on."""

    prompt: tuple[int, ...]
    new_tokens: int
    stop: tuple[str, ...] = ()


@dataclass
class Row:
    """An answer on its way. `read`: tokens of the prompt that the state holds. `measured`: whether to note the bytes of
    its state."""

    at: int
    wanted: Wanted
    tokenizer: Tokenizer
    measured: bool = False
    read: int = 0
    ids: list[int] = field(default_factory=list)
    text: str = ""
    done: bool = False

    @property
    def reading(self) -> bool:
        return self.read < len(self.wanted.prompt)

    def next(self, likeliest: int) -> int:
        """The token to go on with: the prompt's as long as there is one, then what the model finds likeliest."""
        if self.reading:
            self.read += 1
            return self.wanted.prompt[self.read - 1]
        if not self.done:
            self.take(likeliest)
        return max(likeliest, 0)

    def take(self, token: int) -> None:
        if token == NOT_A_NUMBER:
            at = len(self.wanted.prompt) + len(self.ids)
            raise UserError(f"the model's logits are not numbers (NaN) after {at:,} tokens, so it answers nothing")
        if token != self.tokenizer.end:
            self.ids.append(token)
        self.done = token == self.tokenizer.end or len(self.ids) >= self.wanted.new_tokens
        if self.done or self.wanted.stop:
            whole = self.tokenizer.decode(self.ids)
            self.text = cut(whole, self.wanted.stop)
            self.done |= len(self.text) < len(whole)


@dataclass
class Group:
    """Rows whose states have one shape."""

    rows: list[Row]
    logits: Tensor  # [B, vocab_size]
    state: Decoding

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        return tuple(x.shape[1:] for x in pytree.tree_leaves(self.state))


@dataclass
class Language:
    """`batch`: rows that take their steps together, halved for good when they do not fit in memory; the error of a
    single row is raised. `state_bytes`: of a row behind the longest prompt of a call, by its tokens.

    precision: "bf16" multiplies in bfloat16 (autocast) with sums in float32; otherwise the model's dtype is meant.
    """

    model: Model
    tokenizer: Tokenizer
    batch: int = 16
    precision: Precision = "fp32"
    state_bytes: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = self.model.embedding.weight.shape[0]
        if known < self.tokenizer.vocab_size:
            raise UserError(f"the model knows {known} tokens and the tokenizer makes {self.tokenizer.vocab_size}")
        self.model.eval().to(torch.float64 if self.precision == "fp64" else torch.float32)
        self.steps = Steps(self.model, self.precision)

    @property
    def device(self) -> torch.device:
        return self.model.embedding.weight.device

    @property
    def longest(self) -> int | None:
        """Tokens that the model can read and write, None for any number."""
        return None if self.model.position is None else self.model.position.weight.shape[0]

    @torch.inference_mode()
    def answers(self, wanted: Sequence[Wanted]) -> list[str]:
        """What the model writes behind each prompt. Raises `UserError` for empty prompts and too long ones, and where
        the model answers with NaN."""
        for one in wanted:
            self._check(len(one.prompt), one.new_tokens)
        order = sorted(range(len(wanted)), key=lambda i: -len(wanted[i].prompt))  # too little memory shows at once
        texts = [""] * len(wanted)

        def answer(part: Sequence[int]) -> None:
            rows = [Row(i, wanted[i], self.tokenizer, measured=i == order[0]) for i in part]
            try:
                with cast(self.device.type, self.precision):
                    alike = self._read(rows)
                    while alike:
                        self._go_on(joined(alike.pop()))
            except RuntimeError:  # out of memory, perhaps
                self.steps.forget()
                raise
            for row in rows:
                texts[row.at] = row.text

        self.batch = in_batches(order, self.batch, answer)
        return texts

    @torch.inference_mode()
    def likelihoods(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """For each (tokens before, tokens, both at least one): the log-likelihood of the tokens, and whether each is
        the likeliest."""
        for before, then in pairs:
            self._check(len(before), len(then))
        order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
        found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)

        def score(part: Sequence[int]) -> None:
            """Of pairs of one length."""
            tokens = torch.tensor([[*pairs[i][0], *pairs[i][1]] for i in part], device=self.device)
            length, most = tokens.shape[1], max(len(pairs[i][1]) for i in part)
            positions = torch.arange(length - 1 - most, length - 1, device=self.device)
            labels = tokens[:, length - most :].clone()
            for row, i in enumerate(part):
                labels[row, : most - len(pairs[i][1])] = IGNORE
            with cast(self.device.type, self.precision):
                loss, right = self.model(tokens[:, :-1], positions.expand(len(part), -1), head=scores(labels, IGNORE))
            total = -loss.double().sum(1)
            if total.isnan().any():
                raise UserError(f"the model's likelihoods are not numbers (NaN) in texts of {length:,} tokens")
            greedy = (right | (labels == IGNORE)).all(1)
            for i, log_likelihood, is_greedy in zip(part, total.tolist(), greedy.tolist(), strict=True):
                found[i] = log_likelihood, is_greedy

        for length, same in groupby(order, key=lambda i: sum(map(len, pairs[i]))):
            rows = min(self.batch, max(1, READ_AT_ONCE // length))
            if (fitted := in_batches(list(same), rows, score)) < rows:
                self.batch = fitted
        return found

    def _check(self, prompt: int, new: int) -> None:
        if not prompt:
            raise UserError("a prompt has no tokens: a model needs at least one to go on from")
        if self.longest is not None and prompt + new - 1 > self.longest:  # the last token is not read
            raise UserError(
                f"a prompt of {prompt} tokens and {new} new ones are more than the {self.longest} positions that the "
                "model has learned"
            )

    def _read(self, rows: list[Row]) -> list[list[Group]]:
        """Rows behind what their prompts have in common with their neighbours', those together whose states have one
        shape."""
        read: dict[tuple[torch.Size, ...], list[Group]] = {}
        for part in near(rows):
            at = min(len(row.wanted.prompt) for row in part)
            prompts = torch.tensor([row.wanted.prompt[:at] for row in part], device=self.device)
            group = Group(part, *self.model.prefill(prompts))
            for row in part:
                row.read = at
            read.setdefault(group.shapes, []).append(group)
        return list(read.values())

    def _go_on(self, group: Group) -> None:
        """To the end of every row. A state is let go when the next one is there: `group` alone holds it."""
        while True:
            for row in group.rows:
                if row.measured and not row.reading and not row.ids:
                    self.state_bytes[row.read] = nbytes(group.state[1]) // len(group.rows)
            token = likeliest(group.logits[:, : self.tokenizer.vocab_size])
            reading = any(row.reading for row in group.rows)
            then = [row.next(id) for row, id in zip(group.rows, token.tolist(), strict=True)]
            token = torch.tensor(then, device=self.device) if reading else token.clamp(min=0)  # of rows that are done
            # a row that is done would go on beyond the positions that the model has learned
            kept = going_on(group.rows, few_sizes=self.longest is None and self.steps.replays(group.state))
            if not kept:
                return
            if len(kept) < len(group.rows):
                group.rows, token, group.state = [group.rows[i] for i in kept], token[kept], chosen(group.state, kept)
            group.logits, group.state = self.steps(token, group.state)


def likeliest(logits: Tensor) -> Tensor:
    """The token of each row [B], and NOT_A_NUMBER where the logits hold a NaN."""
    return torch.where(logits.isnan().any(-1), NOT_A_NUMBER, logits.argmax(-1))


def going_on(rows: Sequence[Row], few_sizes: bool) -> list[int]:
    """The rows that are not done. With `few_sizes` as many others besides as make it half of all, a quarter, ..., since
    every size of a batch is a graph of its own."""
    left = [i for i, row in enumerate(rows) if not row.done]
    if not left or not few_sizes:
        return left
    size = len(rows)
    while size // 2 >= len(left):
        size //= 2
    return sorted((left + [i for i, row in enumerate(rows) if row.done])[:size])


def joined(groups: list[Group]) -> Group:
    """One of all, whose states have one shape."""
    if len(groups) == 1:
        return groups[0]
    rows = [row for group in groups for row in group.rows]
    state = pytree.tree_map(lambda *xs: torch.cat(xs), *(group.state for group in groups))
    return Group(rows, torch.cat([group.logits for group in groups]), state)


def chosen(state: Decoding, rows: list[int]) -> Decoding:
    """The state of some rows."""
    at = torch.tensor(rows, device=state[0].device)
    kept: Decoding = pytree.tree_map(lambda x: x[at], state)
    return kept


def near(rows: list[Row]) -> Iterator[list[Row]]:
    """Rows, sorted by length, in parts of nearly one length that are read together."""
    part: list[Row] = []
    for row in rows:
        lengths = [len(one.wanted.prompt) for one in (*part, row)]
        if part and (max(lengths) - min(lengths) > NEAR or len(lengths) * max(lengths) > READ_AT_ONCE):
            yield part
            part = []
        part.append(row)
    yield part


def cut(text: str, stop: Iterable[str]) -> str:
    """The text before the first of the stop strings in it."""
    return text[: min((at for one in stop if one and (at := text.find(one)) >= 0), default=len(text))]
