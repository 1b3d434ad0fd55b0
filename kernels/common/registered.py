"""For kernels registered as torch operators: who may call them, absent results, vmap by joining the batch."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from mixassay.kernels import interpreted
from mixassay.kernels.common.precision import autocasts

INSTALLED = find_spec("triton") is not None


def against_triton(*tensors: Tensor | None) -> str | None:
    """Why Triton kernels cannot serve these tensors, or None. Triton's interpreter serves all of them."""
    given = [x for x in tensors if x is not None]
    if not INSTALLED:
        return "the package triton is not installed"
    if interpreted():
        return None
    if away := [x for x in given if x.device.type != "cuda"]:
        return f"its tensors are on {away[0].device.type}, not on a CUDA device"
    if any(x.dtype == torch.float64 for x in given):
        return "it has no float64 kernels"
    return None


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, whatever its tensors are on."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def operand_dtype(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    """What the products read: under autocast its dtype, else the widest of the three; float32 instead of bfloat16 in
    Triton's interpreter, which would multiply that as integers."""
    widest = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    dtype = torch.get_autocast_dtype(q.device.type) if autocasts(q) else widest
    return torch.float32 if dtype == torch.bfloat16 and interpreted() else dtype


def nothing(like: Tensor) -> Tensor:
    """Stands for an absent result: operators return tensors only."""
    return like.new_empty((0,), dtype=torch.float32)


def present(x: Tensor | None) -> Tensor | None:
    return x if x is not None and x.numel() else None


def vmap_joins(*operators: CustomOpDef, packed: int | None = None) -> None:
    """Under vmap one launch serves all members: the mapped axis joins the first one of each tensor.

    `packed` is the place of cu_seqlens among the arguments: where they are given, each member is a call of its own.
    """

    def rule(op: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        if packed is not None and args[packed] is not None:
            return looped(op, info, in_dims, args)
        results = op(*folded(info, in_dims, args))
        if isinstance(results, Tensor):
            return _unfold(results, info.batch_size), 0
        return unfolded(info, results)

    for op in operators:
        op.register_vmap(partial(rule, op))


def folded(info: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> list[Any]:
    """Arguments with the mapped axis folded into their first one. Tensors without elements stay as they are."""
    return [
        _fold(x, dim, info.batch_size) if isinstance(x, Tensor) else x for x, dim in zip(args, in_dims, strict=True)
    ]


def _fold(x: Tensor, dim: int | None, M: int) -> Tensor:
    x = x.unsqueeze(0).expand(M, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def unfolded(info: Any, results: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    return tuple(_unfold(x, info.batch_size) for x in results), (0,) * len(results)


def _unfold(x: Tensor, M: int) -> Tensor:
    return x.view(M, x.shape[0] // M, *x.shape[1:])


def looped(
    op: Callable[..., tuple[Tensor, ...]], info: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """One call for each member: packed sequences of several members cannot be joined without waiting for the device."""
    members = [
        op(*(x if dim is None else x.select(dim, m) for x, dim in zip(args, in_dims, strict=True)))
        for m in range(info.batch_size)
    ]
    return tuple(torch.stack(xs) for xs in zip(*members, strict=True)), (0,) * len(members[0])
