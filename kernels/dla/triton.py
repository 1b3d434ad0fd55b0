"""Long sequences of dynamic linear attention on bases with a scalar decay, in Triton: plan and launches.

Tokens are cut into tiles of C. With s the scale, G the inclusive cumulative log decay, D[t, j] = e^{G_t - G_j} for
j <= t (else 0), M[t, j] = rank_scale[t, rank of j at t] the mask and F = s (Q K^T) . (dO V^T) . D:

    A  = s (Q K^T) . D . M            O  = A V
    dA = s (dO V^T) . D . M           dQ = dA K     dK = dA^T Q     dV = A^T dO
    drank_scale[t, r] = sum of F[t, j] over the tokens j of rank r at t
    dlog_decay_i = sum of u_t over t >= i,   u = row sums less column sums of F . M
    dgate_i = the same of F . up (no boundary at i) or F . down (one at i): straight_through.py

Up to 1024 tokens all pairs of tiles are computed (`pairs_triton.py`). Beyond, tile n has pairs with itself only, and
reads each slot that its first token finds before it as one state, wherever in a tile the slot begins: most are what the
tile before found too (`slot_states_triton.py`). Slots that meet within the tile are two states with one weight. Who
reads a state is one run of tiles, and its gradient one sum over them (`slot_reads_triton.py`). A head with so many
boundaries that there is no room for its states takes a tree instead (`tree_triton.py`). The pairs of a tile with
itself are in `own_pairs_triton.py`; here is the order of all.

The two sides of u are sums over differently made states, and cancel: where u is wanted, products with states are of two
bfloat16 parts, high and low, so that both sides hold the same numbers.

A product is never transposed after it was computed: where a transposed one is needed, its operands are swapped.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixassay.kernels.common.triton import half, operands, sum_dtype
from mixassay.kernels.dla import pairs_triton
from mixassay.kernels.dla.mask_triton import sums
from mixassay.kernels.dla.own_pairs_triton import decay_kernel, key_kernel, output_kernel, query_kernel
from mixassay.kernels.dla.slot_reads_triton import pull_kernel, push_kernel, rank_kernel, read_kernel, weight_kernel
from mixassay.kernels.dla.slot_states_triton import FIRST, STOP, end_kernel, find, join_kernel, own_kernel
from mixassay.kernels.dla.tree_keys_triton import node_kernel, span_kernel, tree_key_kernel
from mixassay.kernels.dla.tree_reads_triton import tree_output_kernel, tree_query_kernel
from mixassay.kernels.dla.tree_triton import TILES, leaf_kernel, up_kernel


class Plan(NamedTuple):
    """How a call is spread over the machine. It changes speed and rounding, nothing else."""

    C: int  # tokens in a tile
    dense: int  # tokens up to which all pairs are computed
    num_warps: int
    pull_warps: int  # of `query` and `key`, which hold most
    num_stages: int
    read_stages: int  # of the loops over the reads of states
    states: int  # of slots, for each tile, that a head has room for: if it has more, it takes the tree
    life: int = 256  # tiles that read one state at most


def plan(dtype: torch.dtype, K: int, V: int) -> Plan:
    """A fixed table, not a search: the same call sums in the same order in every process."""
    if half(dtype):
        if max(K, V) <= 16:
            return Plan(32, 1024, 2, 2, 2, 3, 3)
        return Plan(64, 1024, 4, 4, 2, 3, 4) if max(K, V) <= 64 else Plan(64, 1024, 8, 8, 2, 2, 4)
    exact = operands(dtype)[2] == "ieee"  # without tensor cores, whose tiles want more rows
    return Plan(16, 1024, 8, 8, 1, 1, 2) if exact else Plan(32, 1024, 4, 4, 1, 1, 3)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank_scale: Tensor,
    starts: Tensor,
    until: Tensor,
    log_decay: Tensor | None,
    scale: float,
    how: Plan | None = None,
) -> Tensor:
    """o; rank_scale and log_decay in the accumulator's dtype or narrower, starts and until of the schedule."""
    how = how or plan(q.dtype, q.shape[3], v.shape[3])
    if q.shape[1] <= how.dense:
        return pairs_triton.forward(q, k, v, rank_scale, until, log_decay, scale)
    call = _Call(q, k, v, rank_scale, starts, until, log_decay, scale, how)
    tree, states = call.tree(False)
    weights = call.weights(None, GATE=False)
    o = torch.empty_like(call.v)
    past = torch.empty_like(o, dtype=call.acc)
    call.launch(read_kernel, call.tiles, states=states, weights=weights, past=past, **call.reads)
    call.launch(output_kernel, call.tiles, past=past, o=o)
    call.launch(tree_output_kernel, call.N * triton.cdiv(call.NT, TILES.value), tree=tree, o=o)
    return o


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank_scale: Tensor,
    starts: Tensor,
    until: Tensor,
    log_decay: Tensor | None,
    gated: bool,
    do: Tensor,
    scale: float,
    how: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, rank_scale, log_decay and, where there is one, of the boundaries' gate."""
    how = how or plan(q.dtype, q.shape[3], v.shape[3])
    if q.shape[1] <= how.dense:
        return pairs_triton.backward(q, k, v, rank_scale, until, log_decay, gated, do, scale)
    call = _Call(q, k, v, rank_scale, starts, until, log_decay, scale, how)
    do, decays = do.to(v.dtype).contiguous(), log_decay is not None
    wanted = {"GATE": gated, "TWICE": (gated or decays) and v.dtype == torch.bfloat16}
    alone = call.R == 1  # else the heads that share a key are added
    dq, dk = (call.new(call.B, call.T, call.H, call.K, dtype=q.dtype if alone else call.acc) for _ in range(2))
    dv, dweights = torch.empty_like(call.v), torch.empty_like(call.rank_scale)
    u = call.new(3 if gated else 1, call.N, call.T)
    tree, states = call.tree(wanted["TWICE"])
    turned = call.new(len(u), call.N, call.NT * call.given["SLOTS"], how.C)
    weights = call.weights(turned, **wanted)
    spans = call.new(call.N, call.nodes, dtype=torch.int32)
    call.launch(span_kernel, call.N * triton.cdiv(call.nodes, 64), spans=spans, BLOCK=64, num_warps=4)
    dtree = call.new(len(u), *tree.shape)
    call.launch(push_kernel, call.N * call.room, turned=turned, dtree=dtree, do=do, **wanted, **call.reads)
    call.launch(node_kernel, call.N * triton.cdiv(call.nodes, TILES.value), spans=spans, dtree=dtree, do=do, **wanted)
    call.join(dtree, None, True)
    reads, past = torch.empty_like(weights), torch.empty_like(dq, dtype=call.acc)
    given = {"states": states, "weights": weights, "past": past, "reads": reads, "do": do}
    call.launch(pull_kernel, call.tiles, **given, **wanted, **call.reads)
    pull = wanted | {"num_warps": call.pull_warps}
    gradients = {"dq": dq, "dk": dk, "dv": dv, "drank_scale": dweights, "u": u, "do": do}
    call.launch(query_kernel, call.tiles, past=past, **gradients, **pull)
    call.launch(tree_query_kernel, call.N * triton.cdiv(call.NT, TILES.value), tree=tree, **gradients, **pull)
    call.launch(rank_kernel, call.tiles, reads=reads, **gradients, **wanted)
    call.launch(key_kernel, call.tiles, dtree=dtree, **gradients, **pull)
    call.launch(
        tree_key_kernel, call.N * triton.cdiv(call.NT, TILES.value), spans=spans, dtree=dtree, **gradients, **pull
    )
    dg, dgate = sums(u, None, call.log_decay, call.given["until"], gated)
    if not alone:
        dq, dk = (x.unflatten(2, (-1, call.R)).sum(3).to(q.dtype) for x in (dq, dk))
    return dq, dk, dv, dweights, dg, dgate


class _Call:
    """The sizes of one call, its operands made contiguous, and its launches."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rank_scale: Tensor,
        starts: Tensor,
        until: Tensor,
        log_decay: Tensor | None,
        scale: float,
        how: Plan | None,
    ) -> None:
        (self.B, self.T, G, self.K), (self.H, self.V) = q.shape, v.shape[2:]
        how = how or plan(q.dtype, self.K, self.V)
        self.q, self.k, self.v, self.scale = q.contiguous(), k.contiguous(), v.contiguous(), scale
        dot, acc, precision = operands(q.dtype)
        self.acc = torch.float64 if acc == tl.float64 else torch.float32
        self.rank_scale = rank_scale.to(self.acc).contiguous()
        self.log_decay = None if log_decay is None else log_decay.to(self.acc).contiguous()
        self.pull_warps, self.reads = how.pull_warps, {"num_stages": how.read_stages}
        self.N, self.R, self.NT = self.B * self.H, self.H // G, triton.cdiv(self.T, how.C)
        self.tiles = self.N * self.NT
        self.heights = (self.NT - 1).bit_length()
        self.offsets = [sum(self.NT >> m for m in range(h)) for h in range(self.heights + 1)]
        self.nodes = self.offsets[-1]
        self.room = how.states * self.NT
        self.space = max(self.room, self.nodes)
        G_, P = self.decays(how.C, sum_dtype(q.dtype))
        SLOTS = starts.shape[-1]
        self.given: dict[str, Any] = {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "rank_scale": self.rank_scale,
            "starts": starts.contiguous(),
            "until": until.contiguous(),
            "log_decay": self.log_decay,
            "G": G_,
            "P": P,
            "scale": scale,
            "T": self.T,
            "NT": self.NT,
            "H": self.H,
            "R": self.R,
            "N": self.N,
            "NODES": self.nodes,
            "ROOM": self.room,
            "SPACE": self.space,
            "HEIGHTS": self.heights,
            "K": self.K,
            "V": self.V,
            "BK": pairs_triton.tile_beside(self.K, how.C),
            "BV": pairs_triton.tile_beside(self.V, how.C),
            "SLOTS": SLOTS,
            "BS": max(16, triton.next_power_of_2(SLOTS)),  # a gather needs an element for each thread
            "C": how.C,
            "DECAY": log_decay is not None,
            "DOT": dot,
            "ACC": acc,
            "PREC": precision,
            "num_warps": how.num_warps,
            "num_stages": how.num_stages,
        }
        names = ("numbers", "news", "table")
        self.given |= dict(zip(names, find(self.given["starts"], how.C, how.life, self.room), strict=True))

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.q.new_empty(shape, dtype=dtype or self.acc)

    def launch(self, kernel: Any, programs: int, **more: Any) -> None:
        given = self.given | more
        options = {name: given[name] for name in ("num_warps", "num_stages")}
        kernel[(programs,)](**{name: given[name] for name in kernel.arg_names}, **options)

    def decays(self, C: int, SUM: Any) -> tuple[Tensor | None, Tensor | None]:
        if self.log_decay is None:
            return None, None
        G = self.new(self.N, self.T, dtype={tl.float64: torch.float64}.get(SUM, torch.float32))
        totals = self.new(self.N, self.NT, dtype=G.dtype)
        decay_kernel[(self.tiles,)](self.log_decay, G, totals, self.T, self.NT, self.H, C=C, SUM=SUM, num_warps=1)
        return G, torch.nn.functional.pad(totals.double().cumsum(1), (1, 0))

    def tree(self, twice: bool) -> tuple[Tensor, Tensor]:
        """States of slots or, of a head that has too many, the nodes of the tree; and the states as products take them:
        in the operands' dtype or, `twice`, in two parts."""
        tree = self.new(self.N, self.space, self.K, self.V)
        states = tree
        if half(self.v.dtype):
            states = self.new(1 + twice, *tree.shape, dtype=self.v.dtype)
        self.given |= {"ends": self.new(self.N, self.room, dtype=torch.float64), "fades": self.new(self.N, self.room)}
        if self.log_decay is not None:
            self.launch(end_kernel, self.N * triton.cdiv(self.room, 128), BLOCK=128, num_warps=4)
        self.launch(own_kernel, self.tiles, tree=tree, TWICE=twice, num_stages=1)
        self.join(tree, None if states is tree else states, False, TWICE=twice)
        self.launch(leaf_kernel, self.N * triton.cdiv(self.NT, TILES.value), tree=tree, TWICE=twice)
        for h in range(1, self.heights):
            where = {"HEIGHT": h, "below": self.offsets[h - 1], "here": self.offsets[h]}
            self.launch(up_kernel, self.blocks * self.N * (self.NT >> h), tree=tree, **where, **self.flat)
        return tree, states

    def weights(self, turned: Tensor | None, **wanted: Any) -> Tensor:
        """With which tiles read states, and into `turned` the same for each state."""
        weights = self.new(self.N, self.NT, self.given["SLOTS"], self.given["C"])
        table = self.given["table"]
        lives = table[:, STOP.value] - table[:, FIRST.value]
        found = torch.arange(self.room, device=lives.device) < self.given["news"][:, -1:]
        before = torch.where(found, lives, 0).cumsum(1, dtype=torch.int32) - lives
        self.given["place"] = before - table[:, FIRST.value]
        self.given["passed"] = torch.empty_like(self.given["numbers"], dtype=self.acc)
        self.launch(weight_kernel, self.tiles, weights=weights, turned=turned, **wanted)
        return weights

    @property
    def flat(self) -> dict[str, int]:
        """Of kernels that take a state's numbers one by one."""
        return {"SIZE": self.K * self.V, "BLOCK": 1024, "num_warps": 4}

    @property
    def blocks(self) -> int:
        return triton.cdiv(self.flat["SIZE"], self.flat["BLOCK"])

    def join(self, x: Tensor, states: Tensor | None, back: bool, TWICE: bool = False) -> None:
        rows = x.numel() // (self.space * self.flat["SIZE"])
        self.launch(join_kernel, self.blocks * rows, x=x, states=states, BACK=back, TWICE=TWICE, **self.flat)
