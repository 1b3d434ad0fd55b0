"""The audit of a trained mixer: the same numbers, of the keys and values it has learnt and the cuts it makes."""

import torch
from torch import Tensor

from mixassay.mixers.parts.segmentation import Segmented
from mixassay.runners.audit.cuts import Case, ends_of, scheduled
from mixassay.runners.audit.measure import Tokens
from mixassay.runners.audit.run import Reference, numbers


@torch.no_grad()
def audit_mixer(
    mixer: Segmented, x: Tensor, changes: Tensor, *, prefixes: int = 6, tolerance: int = 2
) -> list[dict[str, float]]:
    """The numbers of every sequence and head, sequences outermost. x [B, T, D] is the mixer's input, `changes` bool
    [B, T] the first tokens of the true segments (`SegmentedRecall.changes`)."""
    found = mixer.segmentation(x)
    k, v, starts = (y.transpose(1, 2).flatten(0, 1).cpu() for y in found)  # [B H, T, ...]
    H = found.starts.shape[2]
    segment = (changes.cpu().cumsum(1) - changes.cpu()[:, :1].long()).repeat_interleave(H, 0)
    needle = torch.zeros_like(segment, dtype=torch.bool)
    rows = tuple(Tokens(k[i].double(), v[i].double(), segment[i], needle[i]) for i in range(len(k)))
    case = Case(rows, ends_of(x.shape[1], prefixes), starts.shape[2])
    cuts, reference = scheduled(starts, case.ends), Reference(case)
    return [numbers(case, reference, cuts, row, tolerance) for row in range(len(rows))]
