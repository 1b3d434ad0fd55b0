"""A linear head and its cross-entropy: the public functions."""

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mixassay.kernels import resolve
from mixassay.kernels.common.precision import accumulator, no_autocast
from mixassay.kernels.common.registered import against_triton
from mixassay.kernels.common.shapes import Axes
from mixassay.kernels.linear_cross_entropy import reference


def linear_cross_entropy(
    h: Tensor, weight: Tensor, labels: Tensor, *, ignore_index: int = -100, backend: str | None = None
) -> Tensor:
    """Cross-entropy of the words that a linear head predicts, row by row.

    h         [R, D]
    weight    [V, D], of the head (tied: of the embedding)
    labels    int64 [R], a word or `ignore_index`
    returns   loss [R], float32 or wider, 0 for rows that are not labelled

    The Triton kernels never store the logits [R, V]. Products are of the dtype of h and weight, under autocast too:
    there, and where torch may use tf32, the kernels take float16 for float32, which keeps ten bits where bfloat16 has
    seven. Rows wider than 256, that no kernel serves, are multiplied in autocast's dtype.

    Raises UserError for shapes that do not fit together and for a backend that cannot serve.
    """
    chosen = _chosen("linear_cross_entropy", h, weight, labels, backend)
    if chosen == "triton":
        from mixassay.kernels.linear_cross_entropy import registered  # the package triton may not be there

        return registered.linear_cross_entropy(h, weight, labels, ignore_index)
    if chosen == "reference":
        dtype = accumulator(h, weight)
        with no_autocast(h):
            return reference.linear_cross_entropy(h.to(dtype), weight.to(dtype), labels, ignore_index)
    return cross_entropy(_logits(h, weight), labels, ignore_index=ignore_index, reduction="none")


@torch.no_grad()
def linear_cross_entropy_score(
    h: Tensor, weight: Tensor, labels: Tensor, *, ignore_index: int = -100, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """As `linear_cross_entropy`, without gradients: loss [R], and bool [R], whether the label is the likeliest word
    (of equally likely ones the first). Rows that are not labelled are never right."""
    chosen = _chosen("linear_cross_entropy_score", h, weight, labels, backend)
    if chosen == "triton":
        from mixassay.kernels.linear_cross_entropy import registered  # the package triton may not be there

        return registered.linear_cross_entropy_score(h, weight, labels, ignore_index)
    logits = _logits(h, weight)
    loss = cross_entropy(logits, labels, ignore_index=ignore_index, reduction="none")
    return loss, logits.argmax(-1) == labels


def _logits(h: Tensor, weight: Tensor) -> Tensor:
    """The products as the kernels make them, or better; in at least float32."""
    dtype = torch.promote_types(h.dtype, weight.dtype)
    with nullcontext() if _too_wide(h) else no_autocast(h):
        logits = torch.nn.functional.linear(h.to(dtype), weight.to(dtype))
    return logits.to(accumulator(logits))


def _chosen(op: str, h: Tensor, weight: Tensor, labels: Tensor, backend: str | None) -> str:
    axes = Axes(op)
    axes.check("h", h, "RD")
    axes.check("weight", weight, "VD")
    if labels.shape != h.shape[:1] or labels.dtype != torch.int64:
        axes.fail(f"labels has shape {list(labels.shape)} and dtype {labels.dtype}, expected int64 [R] = [{len(h)}]")
    return resolve(op, backend, against_triton=against_triton(h, weight) or _too_wide(h))


def _too_wide(h: Tensor) -> str | None:
    return f"its rows are D = {h.shape[1]} wide, more than 256" if h.shape[1] > 256 else None
