"""All tokens at once, through torch's own attention."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    T, H, G = q.shape[1], q.shape[2], k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, T, .]
    near = None
    if window is not None and window < T:
        near = torch.ones(T, T, dtype=torch.bool, device=q.device).tril().triu(1 - window)
    o = scaled_dot_product_attention(q, k, v, attn_mask=near, is_causal=near is None, scale=scale, enable_gqa=G != H)
    return o.transpose(1, 2)
