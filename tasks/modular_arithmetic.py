"""Modular arithmetic without brackets (Delétang et al. 2022, arXiv 2207.02098; Grazzi et al. 2024, arXiv 2411.12537).

    3  +  4  *  2  -  1  =  .  .
    3     2     1     0  0          <- labels, mod 5: the value so far (ask: every)
                         0          <- label (ask: end)

Products bind stronger than sums, so that two numbers must be kept: the sum of what is settled, and the open product.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mixassay import draws
from mixassay.errors import UserError
from mixassay.tasks import IGNORE, Rows, Split, draw_rows, task
from mixassay.tasks.parts.scan import Parts, prefixes


@task("modular_arithmetic")
@dataclass(frozen=True, kw_only=True)
class ModularArithmetic:
    """Digits mod `modulus` with + - * between them, then `=`, at which the value is the label, then padding.

    Digits and operators are uniform and independent, the number of digits is uniform in min_len/2 .. seq_len/2: lengths
    count the `=`. Published: modulus 5, up to 40 tokens in training, 40 to 256 in tests.

    ask: "end", at `=` alone; "every", at each digit as well the value of the expression up to there.

    Ids: digits 0 .. m-1, + m, - m+1, * m+2, = m+3, padding m+4. Chance is 1/m. Products make zero more frequent in
    short expressions (mod 5: 25 % of those with two digits), not in long ones. Published scores are scaled: (accuracy -
    chance) / (1 - chance).

    Rows: positions, labels and the slice "length" (tokens so far) are [N, 1], or [N, seq_len / 2 + 1] for "every", `=`
    being the last.

    >>> rows = ModularArithmetic(min_len=4, seq_len=10, ask="every").rows(torch.tensor([8]), seed=0, split="train")
    >>> rows.tokens.tolist()[0]
    [0, 5, 0, 8, 9, 9, 9, 9, 9, 9]
    >>> rows.positions.tolist()[0], rows.labels.tolist()[0]
    ([0, 2, 0, 0, 0, 3], [0, 0, -100, -100, -100, 0])
    """

    version: ClassVar[int] = 1

    modulus: int = 5
    seq_len: int = 40
    min_len: int = 4
    ask: Literal["end", "every"] = "end"

    def __post_init__(self) -> None:
        if not 2 <= self.modulus <= 2**20:
            raise UserError(f"modular_arithmetic: modulus must be from 2 to 2**20, got {self.modulus}")
        shortest, longest = self.min_len, self.seq_len
        if shortest % 2 or longest % 2 or not 2 <= shortest <= longest <= 2**20:
            raise UserError(
                "modular_arithmetic: lengths must be even (digits, operators between them, =) and"
                f" 2 <= min_len <= seq_len <= 2**20, got {shortest} and {longest}"
            )
        if self.ask not in ("end", "every"):
            raise UserError(f'modular_arithmetic: ask must be "end" or "every", got "{self.ask}"')

    @property
    def vocab_size(self) -> int:
        return self.modulus + 5

    def rows(self, index: Tensor, *, seed: int | Tensor, split: Split) -> Rows:
        """Rows `index` int64 [N] of the split (see `Task`)."""
        stream = draws.stream("modular_arithmetic", self.version, self.modulus, self.seq_len, self.min_len, self.ask)
        return draw_rows(self._draw, 1 + self.seq_len, index, seed=seed, split=split, stream=stream)

    def _draw(self, words: Tensor) -> Rows:
        m, T = self.modulus, self.seq_len
        digits = draws.below(words[:, 1::2], m)  # [N, T / 2]
        operators = draws.below(words[:, 2::2], 3)  # behind each digit; 0 +, 1 -, 2 *
        end = 2 * draws.below(words[:, :1], (T - self.min_len) // 2 + 1) + self.min_len - 1  # where = stands
        tokens = torch.stack((digits, m + operators), dim=2).flatten(1)
        at = torch.arange(T, device=words.device)
        tokens = torch.where(at == end, m + 3, tokens.masked_fill(at > end, m + 4))

        before = torch.cat((torch.zeros_like(digits[:, :1]), operators[:, :-1]), dim=1)
        values = expression(before, digits, m)
        last = values.gather(1, end // 2)
        if self.ask == "end":
            return Rows(tokens, end, last, {"length": end + 1})
        positions = torch.cat(((2 * torch.arange(T // 2, device=words.device)).expand_as(values), end), dim=1)
        behind = positions > end
        return Rows(
            tokens,
            positions.masked_fill(behind, 0),
            torch.cat((values, last), dim=1).masked_fill(behind, IGNORE),
            {"length": (positions + 1).masked_fill(behind, 0)},
        )


def expression(operators: Tensor, digits: Tensor, m: int) -> Tensor:
    """The value mod m of the expression up to each digit: operators [N, n], 0 +, 1 -, 2 *, before digits [N, n].

    With s the settled sum and p the open product, a digit maps p to a p + b and s to s + c p + d: for + and - the
    product is settled and a new one opened, for * it is multiplied. Such maps are closed under composition.
    """
    times = operators == 2
    opened = torch.where(operators == 1, (m - digits) % m, digits)
    start = (digits * times, opened * ~times, (~times).long(), torch.zeros_like(digits))

    def then(first: Parts, second: Parts) -> Parts:
        (a, b, c, d), (e, f, g, h) = first, second
        return e * a % m, (e * b + f) % m, (c + g * a) % m, (d + h + g * b) % m

    _, product, _, settled = prefixes(start, then)
    return (settled + product) % m
