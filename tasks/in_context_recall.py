"""In-context recall as MAD asks it (Poli et al. 2024, arXiv 2403.17844): pairs of a few keys come again and again.

    k1 v1 k2 v2 k1 v1 k3 v3 k2 v2 k1 v1
                v1          v2    v1       <- labels, at a key that has been shown before

Nothing marks a question: every repeated pair is one, and its value stands behind it.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mixassay import draws
from mixassay.errors import UserError
from mixassay.tasks import IGNORE, Rows, Split, draw_rows, task
from mixassay.tasks.parts.repeats import previous

TrainOn = Literal["all", "answers"]


@task("in_context_recall")
@dataclass(frozen=True, kw_only=True)
class InContextRecall:
    """seq_len / 2 pairs `key value`. Keys are the ids below V/2, values the others.

    A row binds every key to one value, uniform and independent, so that two keys may share it. The keys of the pairs
    are uniform with replacement; the last one is uniform among the different keys already shown, so that no row is
    without a question.

    train_on: "all", as MAD does: in training rows every next token is a label, the unforeseeable ones too, while
    validation and test rows score answers alone, so that train/loss and valid/loss are of two kinds. "answers":
    training rows as well.

    Chance is 2/V, for who knows which ids are values.

    Rows: answers are [N, seq_len / 2 - 1], at the keys of the second pair and all later ones; all next tokens are
    [N, seq_len - 1]. The slice "distance" counts tokens since the key was last shown, and is 0 where nothing is asked.

    >>> small = InContextRecall(vocab_size=6, seq_len=12)
    >>> rows = small.rows(torch.tensor([8]), seed=0, split="test")
    >>> rows.tokens.tolist()[0]
    [1, 3, 0, 5, 1, 3, 1, 3, 2, 5, 2, 5]
    >>> rows.positions.tolist()[0], rows.labels.tolist()[0]
    ([0, 4, 6, 0, 10], [-100, 3, 3, -100, 5])
    """

    version: ClassVar[int] = 1

    vocab_size: int = 16
    seq_len: int = 128
    train_on: TrainOn = "all"

    def __post_init__(self) -> None:
        check_recall("in_context_recall", self.vocab_size, self.seq_len, self.train_on)

    def rows(self, index: Tensor, *, seed: int | Tensor, split: Split) -> Rows:
        """Rows `index` int64 [N] of the split (see `Task`)."""
        stream = draws.stream("in_context_recall", self.version, self.vocab_size, self.seq_len, self.train_on)
        sizes = [self.seq_len // 2, self.vocab_size // 2]
        every = split == "train" and self.train_on == "all"

        def draw(words: Tensor) -> Rows:
            for_keys, for_values = torch.split(words, sizes, dim=1)
            quiet = torch.zeros_like(for_keys, dtype=torch.bool)
            return recalled(*bound(for_keys, for_values, self.vocab_size, quiet), every)

        return draw_rows(draw, sum(sizes), index, seed=seed, split=split, stream=stream)


def check_recall(name: str, V: int, seq_len: int, train_on: str) -> None:
    """Raises `UserError` for what no recall task takes."""
    if not 4 <= V <= 2**20:
        raise UserError(f"{name}: two keys and two values need a vocabulary from 4 to 2**20, got {V}")
    if seq_len % 2 or seq_len < 4:
        raise UserError(f"{name}: seq_len must be even and at least 4 (pairs are two tokens), got {seq_len}")
    if train_on not in ("all", "answers"):
        raise UserError(f'{name}: train_on must be "all" or "answers", got "{train_on}"')


def bound(for_keys: Tensor, for_values: Tensor, V: int, noisy: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs [N, P, 2] and the number of each one's key [N, P].

    for_keys: words [N, P]. for_values: words [N, V / 2], one for each key. noisy: bool [N, P], pairs that show no key;
    they get numbers of their own, and are to be written over. At least one of the others is no noise, nor is the last.
    """
    P, K = for_keys.shape[1], V // 2
    keys = draws.below(for_keys, K)
    shown = torch.zeros(len(keys), K + 1, dtype=torch.bool, device=keys.device)
    shown = shown.scatter_(1, keys[:, :-1].masked_fill(noisy[:, :-1], K), True)[:, :K]
    which = for_keys[:, -1] * shown.sum(1) >> 32
    keys[:, -1] = (shown.cumsum(1) <= which[:, None]).sum(1)
    values = K + draws.below(for_values, V - K).gather(1, keys)
    number = torch.where(noisy, K + torch.arange(P, device=keys.device), keys)
    return torch.stack((keys, values), dim=2), number


def recalled(pairs: Tensor, number: Tensor, every: bool) -> Rows:
    """Rows of these pairs: asked for the values of keys that have been shown, or for `every` next token."""
    tokens = pairs.flatten(1)
    at = 2 * torch.arange(1, pairs.shape[1], device=tokens.device)
    since = at // 2 - previous(number)[:, 1:]
    new = since > at // 2
    distance = (2 * since).masked_fill(new, 0)
    if every:
        whole = torch.zeros_like(tokens[:, 1:]).scatter_(1, at.expand_as(distance), distance)
        positions = torch.arange(tokens.shape[1] - 1, device=tokens.device).expand_as(whole)
        return Rows(tokens, positions, tokens[:, 1:], {"distance": whole})
    labels = pairs[:, 1:, 1].masked_fill(new, IGNORE)
    return Rows(tokens, at.expand_as(new).masked_fill(new, 0), labels, {"distance": distance})
