"""Log-linear attention in Triton: how a call is spread over the machine, and its launches, forward and backward.

Tokens are cut into chunks of C. A pair (i, j) of one chunk has the level bit_length(i xor j). Across chunks, chunk n
sees one node of a binary tree of chunk states for every set bit m of n: the 2^m chunks before (n >> m) << m, at level
log2(C) + 1 + m. Levels past the last weight share it. With s the scale, G a chunk's inclusive cumulative log decay,
Gam_ij = e^{G_i - G_j} for j <= i (else 0), Lam_ij the weight lambda_i of the pair's level, and for each node m seen
w_m = s e^{G + log decay from the node's end to the chunk}:

    A  = s (Q K^T) . Gam . Lam         O  = A V + sum_m lambda_m w_m Q S_m

`tree_triton.py` has the states S_m and their gradients, `chunk_triton.py` what reads them, `nodes_triton.py` where they
lie. Each kernel is parallel over chunks, and every sum has a fixed order.

States of more than BK x BV are cut into blocks (kb, vb) that are worked on apart and whose parts are added in order. A
product is never transposed after it was computed: where a transposed one is needed, its operands are swapped.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from mixassay.kernels.common.triton import half, operands, sum_dtype, tile
from mixassay.kernels.log_linear_attention import short_triton
from mixassay.kernels.log_linear_attention.chunk_triton import gate_kernel, keys_kernel, output_kernel, queries_kernel
from mixassay.kernels.log_linear_attention.nodes_triton import FAR, LEAVES, Chunks
from mixassay.kernels.log_linear_attention.tree_triton import (
    FAN,
    decay_kernel,
    down_kernel,
    far_kernel,
    leaf_kernel,
    near_kernel,
    parts_kernel,
    up_kernel,
)

SLICE = 1024  # elements of a state that one program adds up, where it only adds


class Launch(NamedTuple):
    num_warps: int
    num_stages: int
    maxnreg: int | None = None  # registers of a thread


class Plan(NamedTuple):
    """How a call is spread over the machine. It changes speed and rounding, nothing else."""

    C: int  # tokens in a chunk
    block: int  # largest BK and BV
    leaf: Launch
    output: Launch
    far: Launch
    near: Launch
    keys: Launch
    queries: Launch


def plan(dtype: torch.dtype, K: int, V: int) -> Plan:
    """A fixed table, not a search: the same call sums in the same order in every process."""
    two, three = Launch(4, 2), Launch(8, 3)
    if half(dtype) and max(K, V) > 64:
        return Plan(64, 128, Launch(8, 1), two, three, Launch(8, 1), keys=Launch(4, 1), queries=two)
    if half(dtype):  # fewer registers: more programs at a time
        return Plan(64, 64, Launch(4, 1), two, two, Launch(4, 1), keys=Launch(4, 1, 128), queries=Launch(4, 2, 168))
    exact = operands(dtype)[2] == "ieee"  # without tensor cores
    other = Launch(8 if exact else 4, 1)
    return Plan(32, 64, other, other, other, other, other, other)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what states are kept: in what a product reads them."""
    return torch.float32 if dtype == torch.float32 else dtype


def tree_shape(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[int, ...] | None:
    """Of what `forward` keeps. None if no sequence has two chunks, or rows are short."""
    (B, T, _, K), (H, V) = q.shape, v.shape[2:]
    C = plan(q.dtype, K, V).C
    if T <= C or _short(q, v, cu_seqlens):
        return None
    chunks = Chunks.of(B, T, C, cu_seqlens)
    return chunks.sequences, chunks.NT, H, K, V


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    how: Plan | None = None,
) -> tuple[Tensor, Tensor | None]:
    """o, and for the backward the tree of chunk states, if a sequence has more than one chunk and is not short."""
    if how is None and _short(q, v, cu_seqlens):
        return short_triton.forward(q, k, v, level_scale, log_decay, scale), None
    call = _Call(q, k, v, level_scale, log_decay, scale, cu_seqlens, how)
    tree = call.tree() if call.heights else None
    o = call.parts(call.keys, v)
    call.launch(
        output_kernel,
        call.how.output,
        call.chunks.total * call.blocks,
        (*call.tensors, tree, call.sums, o),
        **call.shared("scale", "rows", "R", "K", "V", "L", "LOG", "BK", "BV", "DECAY", "DOT", "SUM", "PREC"),
        HAS_TREE=tree is not None,
    )
    return call.joined(o, v), tree


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    tree: Tensor | None,
    do: Tensor,
    how: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v, level_scale and log_decay; `tree` from `forward` with the same plan."""
    if how is None and _short(q, v, cu_seqlens):
        return short_triton.backward(q, k, v, level_scale, log_decay, scale, do)
    call = _Call(q, k, v, level_scale, log_decay, scale, cu_seqlens, how)
    rows, H, L, chunks = call.rows, v.shape[2], level_scale.shape[-1], call.chunks
    do = do.to(v.dtype).contiguous()
    dtree, anchors, offset = call.dtree(do, tree) if tree is not None else (None, None, 0)
    dq, dk, dv = call.parts(call.values, q), call.parts(call.values, k), call.parts(call.keys, v)
    blocks = call.keys * call.values
    dlevel = q.new_empty((blocks, rows, H, L), dtype=call.acc)
    u = along = across = None
    if call.g is not None:
        u = q.new_empty((blocks, rows, H), dtype=call.acc)
        along = q.new_empty((blocks, chunks.sequences, H, chunks.NT), dtype=call.acc)
        across = q.new_empty((blocks, call.heights, chunks.sequences, H, chunks.NT), dtype=call.acc)
    shared = call.shared("scale", "rows", "R", "K", "V", "L", "LOG", "BK", "BV", "DECAY", "DOT", "SUM", "PREC")
    programs = chunks.total * call.blocks
    call.launch(
        keys_kernel,
        call.how.keys,
        programs,
        (*call.tensors, do, dtree, dk, dv, u),
        offset=offset,
        HAS_TREE=tree is not None,
        **shared,
    )
    call.launch(
        queries_kernel,
        call.how.queries,
        programs,
        (*call.tensors, do, tree, call.sums, dq, dlevel, u, along, across),
        sequences=chunks.sequences,
        HEIGHTS=call.heights,
        LP=triton.next_power_of_2(L),
        HAS_TREE=tree is not None,
        **shared,
    )
    dg = None
    if log_decay is not None:
        dg = q.new_empty(log_decay.shape, dtype=call.acc)
        call.launch(
            gate_kernel,
            Launch(1, 1),
            chunks.total * H,
            (u, along, across, anchors, call.log_decay, dg),
            **call.shared("rows"),
            sequences=chunks.sequences,
            HEIGHTS=call.heights,
            BLOCKS=blocks,
            SLICES=call.slices,
            SLICES_P2=triton.next_power_of_2(call.slices),
            BLOCK=128,
            DEEP=call.heights > 3,
        )
        dg = dg.to(log_decay.dtype)
    dlevel = (dlevel[0] if blocks == 1 else dlevel.sum(0)).view(level_scale.shape).to(level_scale.dtype)
    return call.joined(dq, q), call.joined(dk, k), call.joined(dv, v), dlevel, dg


def _short(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> bool:
    return cu_seqlens is None and short_triton.serves(q.dtype, q.shape[1], q.shape[3], v.shape[3])


class _Call:
    """The sizes of one call, its operands made contiguous, and what its launches share."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        level_scale: Tensor,
        log_decay: Tensor | None,
        scale: float,
        cu_seqlens: Tensor | None,
        how: Plan | None,
    ) -> None:
        (B, T, G, K), (H, V) = q.shape, v.shape[2:]
        self.how = how or plan(q.dtype, K, V)
        self.q, self.k, self.v = q.contiguous(), k.contiguous(), v.contiguous()
        self.acc = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.state = state_dtype(q.dtype)
        self.level_scale = level_scale.to(self.acc).contiguous()
        self.log_decay = None if log_decay is None else log_decay.to(self.acc).contiguous()
        BK, BV = (min(self.how.block, tile(D)) for D in (K, V))
        self.keys, self.values = triton.cdiv(K, BK), triton.cdiv(V, BV)
        self.rows, self.heads, self.shape = B * T, H, (H, K, V)
        self.blocks, self.slices = H * self.keys * self.values, triton.cdiv(K * V, SLICE)
        self.chunks = Chunks.of(B, T, self.how.C, cu_seqlens)
        self.heights = (triton.cdiv(T, self.how.C) - 1).bit_length()  # the nodes that are seen have heights below
        dot, self.tl_acc, precision = operands(q.dtype)
        self.values_of = {
            "scale": scale,
            "rows": self.rows,
            "R": H // G,
            "K": K,
            "V": V,
            "L": level_scale.shape[-1],
            "LOG": self.how.C.bit_length() - 1,
            "BK": BK,
            "BV": BV,
            "DECAY": log_decay is not None,
            "DOT": dot,
            "SUM": sum_dtype(q.dtype),
            "PREC": precision,
        }
        self.g, self.sums = self.decays()
        self.tensors = (self.q, self.k, self.v, self.g, self.level_scale)

    def shared(self, *names: str) -> dict[str, Any]:
        return {name: self.values_of[name] for name in names}

    def launch(
        self, kernel: Any, launch: Launch, programs: int, tensors: tuple[Tensor | None, ...], **flags: Any
    ) -> None:
        kernel[(programs,)](
            *tensors,
            table=self.chunks.table,
            T=self.chunks.T,
            NT=self.chunks.NT,
            H=self.heads,
            C=self.how.C,
            PACKED=self.chunks.table is not None,
            ACC=self.tl_acc,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            maxnreg=launch.maxnreg,
            **flags,
        )

    def elementwise(self, kernel: Any, group: int, tensors: tuple[Tensor | None, ...], **flags: Any) -> None:
        """A kernel over groups of chunks, and over the elements of a state."""
        _, K, V = self.shape
        programs = self.chunks.groups(group) * self.heads * self.slices
        self.launch(kernel, Launch(4, 1), programs, tensors, SIZE=K * V, BLOCK=SLICE, **flags)

    def decays(self) -> tuple[Tensor | None, Tensor | None]:
        """Cumulative log decays: of tokens within their chunk [rows, H], and at the chunks' ends [sequences, H, NT]."""
        if self.log_decay is None:
            return None, None
        H, chunks = self.heads, self.chunks
        wide = torch.float32 if half(self.q.dtype) else torch.float64
        g = self.q.new_empty((self.rows, H), dtype=wide)
        totals = self.q.new_empty((chunks.sequences, H, chunks.NT), dtype=torch.float64)
        HEADS = min(16, triton.next_power_of_2(H))
        self.launch(
            decay_kernel,
            Launch(4, 1),
            chunks.total * triton.cdiv(H, HEADS),
            (self.log_decay, g, totals),
            HEADS=HEADS,
            **self.shared("SUM"),
        )
        return g, totals.cumsum(-1) if self.heights else totals

    def tree(self) -> Tensor:
        """The states that chunks see."""
        chunks, (H, K, V) = self.chunks, self.shape
        # Superfluous chunks of packed sequences write nothing: zeros, so that reruns are equal.
        new = self.q.new_empty if chunks.table is None else self.q.new_zeros
        tree = new((chunks.sequences, chunks.NT, H, K, V), dtype=self.state)
        self.launch(
            leaf_kernel,
            self.how.leaf,
            chunks.groups(LEAVES) * self.blocks,
            (self.k, self.v, self.g, tree),
            **self.shared("R", "K", "V", "BK", "BV", "DECAY", "DOT", "SUM", "PREC"),
        )
        for height in range(2, self.heights - 1, 4):
            self.elementwise(up_kernel, FAN << height, (tree, self.sums), HEIGHT=height, **self.shared("DECAY"))
        return tree

    def dtree(self, do: Tensor, tree: Tensor) -> tuple[Tensor, Tensor | None, int]:
        """The gradients of the tree's slots, and after them the parts and, from the offset on, the totals that they are
        summed up with; the anchors of the decay's gradient."""
        total, heights = self.chunks.total, self.heights
        offset = total + max(heights - 4, 0) * triton.cdiv(total, FAR)
        size = offset + (triton.cdiv(total, LEAVES) if heights > 2 else 0)
        dtree = self.q.new_empty((size, *self.shape), dtype=self.state)
        anchors = None
        inputs = (self.q, do, self.g, self.level_scale, self.sums, dtree)
        shared = self.shared("scale", "R", "K", "V", "L", "LOG", "BK", "BV", "DECAY", "DOT", "SUM", "PREC")
        if heights > 2:
            packs = triton.cdiv(heights - 2, 2)
            programs = self.chunks.groups(FAR) * self.blocks * packs
            self.launch(
                far_kernel, self.how.far, programs, inputs, chunks=total, HEIGHTS=heights, PACKS=packs, **shared
            )
            if heights > 4:
                self.elementwise(parts_kernel, 2 * FAR, (dtree,), chunks=total)
            if self.sums is not None:
                anchors = self.sums.new_empty((self.slices, *self.sums.shape), dtype=self.acc)
            self.elementwise(
                down_kernel,
                LEAVES,
                (tree, dtree, self.sums, anchors),
                offset=offset,
                sequences=self.chunks.sequences,
                HEIGHTS=heights,
                **self.shared("DECAY"),
            )
        programs = self.chunks.groups(LEAVES) * self.blocks
        self.launch(near_kernel, self.how.near, programs, inputs, offset=offset, HAS_TOTALS=heights > 2, **shared)
        return dtree, anchors, offset

    def parts(self, n: int, like: Tensor) -> Tensor:
        """Room for n addends of every head of `like`, in its dtype if nothing is to be added."""
        heads, width = like.shape[2:]
        alone = n == 1 and heads == self.heads
        return like.new_empty((n, self.rows, self.heads, width), dtype=like.dtype if alone else self.acc)

    def joined(self, parts: Tensor, like: Tensor) -> Tensor:
        """Sum the addends, and the heads that share a head of `like`."""
        if parts.shape[0] == 1 and parts.shape[2] == like.shape[2]:
            return parts.view(like.shape)
        parts = parts.unflatten(2, (like.shape[2], -1))  # [n, rows, G, H / G, width]
        return parts.sum((0, 3)).view(like.shape).to(like.dtype)
