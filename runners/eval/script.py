"""In the place of a language model: behind a prompt that it knows it writes what it was told, behind any other nothing.

It reads and writes token by token as a recurrent mixer does, so that all but the weights of an evaluation is what it
will be: how prompts are encoded, sorted, read together and cut, how answers end, and whose answer is whose.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mixassay.model import Decoding
from mixassay.runners.eval.language import Language

BASE = 6364136223846793005
"""Of the polynomial hash, modulo 2^64, by which a prompt is known from its tokens: one addition a step."""


class Script(nn.Module):
    """`lines`: prompt -> what is written behind it, before `end`. `position`: of the model whose place it takes."""

    def __init__(
        self, lines: Mapping[tuple[int, ...], Sequence[int]], words: int, end: int, position: nn.Embedding | None
    ) -> None:
        super().__init__()
        self.embedding, self.position, self.end = nn.Embedding(words, 1), position, end
        self.lines = list(lines.values())
        self.known = {int(hashed(torch.tensor([prompt]))): line for line, prompt in enumerate(lines)}

    def prefill(self, tokens: Tensor) -> tuple[Tensor, Decoding]:
        nowhere = torch.full_like(tokens[:, 0], -1)
        return self._say(torch.full_like(nowhere, tokens.shape[1]), hashed(tokens), nowhere, nowhere)

    def step(self, tokens: Tensor, state: Decoding) -> tuple[Tensor, Decoding]:
        position, [(seen, line, written)] = state
        return self._say(position + 1, seen * BASE + tokens + 1, line, written)

    def _say(self, position: Tensor, seen: Tensor, line: Tensor, written: Tensor) -> tuple[Tensor, Decoding]:
        """`seen`: the hash of all tokens. `line`: of the script that is being written, -1 for none; `written` of it."""
        begun = torch.tensor([self.known.get(h, -1) for h in seen.tolist()])
        line, written = torch.where(begun >= 0, begun, line), torch.where(begun >= 0, 0, written + 1)
        said = [self._token(*at) for at in zip(line.tolist(), written.tolist(), strict=True)]
        logits = torch.zeros(len(said), len(self.embedding.weight)).scatter_(1, torch.tensor(said)[:, None], 1.0)
        return logits, (position, [(seen, line, written)])

    def _token(self, line: int, at: int) -> int:
        return self.lines[line][at] if line >= 0 and at < len(self.lines[line]) else self.end


def told(language: Language, lines: Mapping[str, Sequence[int]]) -> Language:
    """The same but for its model: behind each prompt it writes these tokens."""
    words, model = language.tokenizer, language.model
    ids = {tuple(words.encode(prompt)): line for prompt, line in lines.items()}
    stand_in: Any = Script(ids, len(model.embedding.weight), words.end, model.position)
    return replace(language, model=stand_in, state_bytes={})


def hashed(tokens: Tensor) -> Tensor:
    """tokens int64 [B, T] -> [B], the sum of BASE^(T - 1 - t) (token + 1)."""
    powers = torch.full_like(tokens[0], BASE)
    powers[:1] = 1
    return ((tokens + 1) * powers.cumprod(0).flip(0)).sum(1)
