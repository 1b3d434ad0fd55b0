"""What a mixer shows of a past that it cuts into slots, so that the cuts can be audited on its own keys and values.

A mixer that reads from slots of consecutive tokens may have, besides `forward` and `step`, a method

    def segmentation(self, x: Tensor) -> Segmentation        # x [B, T, D], as for forward

`runners/audit/mixer.py` then measures bias, bound and boundaries of every head as it does for policies on streams.
"""

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class Segmentation(NamedTuple):
    """As the slots saw them: k with its feature map, v as it is written (scaled by beta or dt, if it is)."""

    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, H, V]
    starts: Tensor  # int32 [B, T, H, S], as in `kernels/dla/slots.py`: Schedule.starts


@runtime_checkable
class Segmented(Protocol):
    def segmentation(self, x: Tensor) -> Segmentation: ...
