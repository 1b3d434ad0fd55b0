"""Feature maps phi of linear attention: what stands in for q and k. A ratio of sums of phi(q).phi(k) needs phi >= 0."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor
from torch.nn.functional import elu, relu, silu

FeatureMap = Literal["elu", "relu", "softmax", "silu", "identity"]

FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: elu(x) + 1,
    "relu": relu,
    "softmax": lambda x: x.softmax(-1),
    "silu": silu,
    "identity": lambda x: x,
}
NON_NEGATIVE = ("elu", "relu", "softmax")
EPS = 1e-6
"""Added to the sum that a ratio divides by, which `relu` can make 0."""
