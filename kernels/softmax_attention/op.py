"""Causal softmax attention: the public functions."""

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mixassay.kernels import resolve
from mixassay.kernels.common.precision import accumulator, no_autocast
from mixassay.kernels.common.registered import against_triton, operand_dtype
from mixassay.kernels.common.shapes import Axes
from mixassay.kernels.softmax_attention import parallel, reference


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Causal softmax attention (Vaswani et al. 2017), grouped (Ainslie et al. 2023) if k and v have fewer heads.

    q           [B, T, H, K]
    k, v        [B, T, G, K], [B, T, G, V]; G divides H, and head i of k and v serves q's i H/G ... (i + 1) H/G - 1
    scale       None: K**-0.5
    window      a token sees itself and the window - 1 tokens before it; None: all before it
    returns     o [B, T, H, V]

    Raises UserError for shapes that do not fit together and for a backend that cannot serve.
    """
    axes = Axes("softmax_attention")
    axes.check("q", q, "BTHK")
    axes.check("k", k, "BTGK")
    axes.check("v", v, "BTGV")
    axes.check_groups("k", "q")
    axes.check_positive("T", q.shape[1])
    axes.check_positive("window", window)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if resolve("softmax_attention", backend, against_triton="it has no Triton kernel") == "reference":
        return reference.softmax_attention(q, k, v, scale, window)
    return parallel.softmax_attention(q, k, v, scale, window)


def packed_attention(
    qkv: Tensor, *, scale: float | None = None, window: int | None = None, backend: str | None = None
) -> Tensor:
    """`softmax_attention` of q, k and v that lie side by side: qkv [B, T, 3, H, K] -> o [B, T, H, K].

    The Triton kernels leave the three gradients side by side, too, where the others copy them together. `auto` takes
    them for half precision (autocast's included); they have no window and heads of at most 128 channels.
    """
    axes = Axes("packed_attention")
    axes.check("qkv", qkv, "BTPHK")
    if qkv.shape[2] != 3:
        axes.fail(f"qkv has shape {list(qkv.shape)}, expected [B, T, 3, H, K]")
    axes.check_positive("T", qkv.shape[1])
    axes.check_positive("window", window)
    scale = 1 / math.sqrt(qkv.shape[-1]) if scale is None else scale
    against = against_triton(qkv) or _against(qkv, window)
    half = operand_dtype(qkv, qkv, qkv).itemsize == 2
    if resolve("packed_attention", backend or (None if half else "torch"), against_triton=against) == "triton":
        from mixassay.kernels.softmax_attention import registered  # the package triton may not be there

        return registered.packed_attention(qkv, scale)
    q, k, v = qkv.unbind(2)
    return softmax_attention(q, k, v, scale=scale, window=window, backend=backend)


def _against(qkv: Tensor, window: int | None) -> str | None:
    if window is not None and window < qkv.shape[1]:
        return "it has no window"
    return f"its heads of {qkv.shape[-1]} are wider than 128" if qkv.shape[-1] > 128 else None


def softmax_attention_step(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """One token of `softmax_attention`: q [B, H, K] against the T tokens kept, its own included: k [B, T, G, K],
    v [B, T, G, V] -> o [B, H, V]. With a window, keep the last `window` tokens."""
    axes = Axes("softmax_attention_step")
    axes.check("q", q, "BHK")
    axes.check("k", k, "BTGK")
    axes.check("v", v, "BTGV")
    axes.check_groups("k", "q")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    alike = q.dtype == k.dtype == v.dtype in (torch.bfloat16, torch.float16)
    if alike and not torch._C._are_functorch_transforms_active():
        # Widened, as below, the whole cache would be copied for every token.
        o = scaled_dot_product_attention(
            q.unsqueeze(2), k.transpose(1, 2), v.transpose(1, 2), scale=scale, enable_gqa=k.shape[2] != q.shape[1]
        )
        return o.squeeze(2)
    dtype = accumulator(q, k, v)
    with no_autocast(q):
        query = (scale * q.to(dtype)).reshape(q.shape[0], k.shape[2], -1, q.shape[-1])  # [B, G, H/G, K]
        p = (query @ k.to(dtype).permute(0, 2, 3, 1)).softmax(-1)  # [B, G, H/G, T]
        return (p @ v.to(dtype).transpose(1, 2)).flatten(1, 2).to(v.dtype)
