"""What each operator carries from token to token: matrices of constant size, one for each head of k (G) or of q (H).

W is V, or V + 1 with `normalize`: then the last column of values is the denominator's. With packed sequences N takes
the place of B. The symbols are those of README.md.
"""

from typing import Any, NamedTuple, TypeVar

from torch import Tensor


class HLA2State(NamedTuple):
    S: Tensor  # [B, G, K, K], sum of k k^T
    F: Tensor  # [B, H, K, W], sum of kappa v^T


class HLA2PrefixState(NamedTuple):
    S: Tensor  # [B, G, K, K], sum of k k^T
    C: Tensor  # [B, H, K, W], sum of q v^T


class AHLAState(NamedTuple):
    P: Tensor  # [B, G, K, W], sum of k v^T
    E: Tensor  # [B, H, K, W], sum of k nu^T


class HLA3State(NamedTuple):
    S: Tensor  # [B, G, K, K], sum of k k^T
    P: Tensor  # [B, G, K, W], sum of k v^T
    F: Tensor  # [B, H, K, W], sum of kappa nu^T


class HLA3PaperState(NamedTuple):
    S: Tensor  # [B, G, K, K], sum of k k^T
    R: Tensor  # [B, H, K, K], sum of q q^T
    P: Tensor  # [B, G, K, W], sum of k v^T
    F: Tensor  # [B, H, K, W], sum of a v^T + k b^T


State = TypeVar("State", bound=tuple[Any, ...])

AXES: dict[type, tuple[str, ...]] = {
    HLA2State: ("BGKK", "BHKW"),
    HLA2PrefixState: ("BGKK", "BHKW"),
    AHLAState: ("BGKW", "BHKW"),
    HLA3State: ("BGKK", "BGKW", "BHKW"),
    HLA3PaperState: ("BGKK", "BHKK", "BGKW", "BHKW"),
}
"""The axes of each field."""


def empty(kind: type[State], like: Tensor, **size: int) -> State:
    """The state before the first token, e.g. `empty(HLA2State, q, B=2, G=1, H=4, K=8, W=8)`."""
    return kind(*(like.new_zeros([size[letter] for letter in axes]) for axes in AXES[kind]))
