"""What both log-linear operators must satisfy beyond `contract.py`: an operator's test file lists its inputs.

The contract sees a state as its slots; positions are those of POSITIONS, so that the rows of a batch differ.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from mixassay.errors import UserError
from mixassay.kernels.common import fenwick
from mixassay.kernels.common.fenwick import FenwickState, level, levels

from . import contract
from .contract import TOL, Case, Inputs, assert_close, error, values

POSITIONS = (5, 12, 0, 64)  # of the initial states' rows
WITH_POSITIONS_HERE = (
    contract.check_batch_independent,
    contract.check_two_calls_are_one,
    contract.check_steps_are_the_whole,
)


@dataclass(frozen=True)
class LogLinear(contract.Operator):
    """`dense` is the parent's: here it gets the level weights and the slots of a state."""

    public: Callable[..., tuple[Tensor, Any]]
    parent: Callable[..., tuple[Tensor, Any]]
    matrix: Callable[..., Tensor]  # the operator's own dense form, which knows no state

    def make(self, case: Case, dtype: torch.dtype = torch.float64, seed: int = 0, L: int | None = None) -> Inputs:
        made = super().make(case, dtype, seed)
        draw = torch.Generator().manual_seed(seed + 100)
        B, H, L = case.B, case.heads[1], L or (5 if case.T % 3 == 2 else 9)
        made["level_scale"] = torch.rand(B, case.T, H, L, generator=draw, dtype=torch.float64).to(dtype)
        if case.start:
            slots = torch.randn(B, H, L, *case.dims, generator=draw, dtype=torch.float64)
            made["initial_state"] = (slots * live(POSITIONS[:B], L)).to(dtype)
        return made

    def run(self, inputs: Inputs, form: str, **options: Any) -> tuple[Tensor, Tensor]:
        if form != "dense":
            return super().run(inputs, form, **options)
        first = state(inputs["initial_state"])
        rows = []
        for b in range(len(inputs["q"])):
            given = {n: None if x is None else x[b : b + 1] for n, x in inputs.items() if n != "initial_state"}
            slots, position = (None, 0) if first is None else (first.slots[b : b + 1], int(first.position[b]))
            rows.append(self._dense(given, slots, position))
        o, slots = zip(*rows, strict=True)
        return torch.cat(o), torch.cat(slots)

    def _dense(self, given: Inputs, slots: Tensor | None, position: int) -> tuple[Tensor, Tensor]:
        """Every token, and for every slot of the state one of the tokens in it, has a column of values of its own."""
        level_scale, v = given["level_scale"], given["v"]
        _, T, H, L = level_scale.shape
        K, V = given["k"].shape[-1], v.shape[-1]
        t = position + torch.arange(T)
        unit = torch.eye(T, dtype=v.dtype).view(1, T, 1, T).expand(1, T, H, T)
        seen: list[tuple[int, int]] = []  # slot, a token in it
        for slot in range(L if slots is not None else 0):
            inside = [s for s in range(position) if min(((position - 1) ^ s).bit_length(), L - 1) == slot]
            seen += [(slot, inside[-1])] if inside else []
        columns = torch.cat([unit, v.new_zeros(1, T, H, V * len(seen))], dim=-1)
        first = torch.cat([v.new_zeros(1, H, K, T), *(slots[:, :, slot] for slot, _ in seen)], dim=-1)  # type: ignore[index]
        args = [columns if n == "v" else given[n] for n in self.names if n != "level_scale"]
        read, final = self.dense(*args, K**-0.5, first)
        read, *reads = read.split([T] + [V] * len(seen), dim=-1)
        final, *finals = final.split([T] + [V] * len(seen), dim=-1)
        Lam = level_scale[0][torch.arange(T)[:, None], :, level(t[:, None], t, L)]  # [T, T, H]
        o = torch.einsum("bihj,ijh,bjhv->bihv", read, Lam, v)
        last = (level(t[-1:], t, L)[:, None] == torch.arange(L)).to(v.dtype)  # [T, L]
        kept = torch.einsum("bhkj,jl,bjhv->bhlkv", final, last, v)
        for (_, s), y, S in zip(seen, reads, finals, strict=True):
            o = o + level_scale[0, torch.arange(T), :, level(t, torch.tensor(s), L)][None, ..., None] * y
            here = level(t[-1], torch.tensor(s), L) == torch.arange(L)
            kept = kept + here.to(v.dtype).view(-1, 1, 1) * S.unsqueeze(2)
        return o, kept

    def without_state(self, case: Case, L: int | None = None, **options: Any) -> Inputs:
        made = self.make(case, L=L, **options)
        del made["initial_state"]
        return made

    def parents(self, inputs: Inputs) -> Inputs:
        return {n: x for n, x in inputs.items() if n != "level_scale"}


def live(positions: tuple[int, ...], L: int) -> Tensor:
    """[B, 1, L, 1, 1]: 1 where a slot holds tokens."""
    holds = [[float(slot in fenwick.live(p, L)) for slot in range(L)] for p in positions]
    return torch.tensor(holds, dtype=torch.float64).view(len(positions), 1, L, 1, 1)


def state(slots: Tensor | None) -> FenwickState | None:
    return None if slots is None else FenwickState(slots, torch.tensor(POSITIONS[: len(slots)]))


def operator(public: Any, step: Any, matrix: Any, parent: Any, parents_dense: Any, names: tuple[str, ...]) -> LogLinear:
    def call(initial_state: Tensor | None = None, **given: Any) -> tuple[Tensor, Tensor | None]:
        if initial_state is not None:
            mask = live(POSITIONS[: len(initial_state)], initial_state.shape[2])
            initial_state = initial_state * mask.to(initial_state)
        o, final = public(initial_state=state(initial_state), **given)
        return o, None if final is None else final.slots

    return LogLinear(call, step, parents_dense, names, public, parent, matrix)


def check_matrix(op: LogLinear) -> None:
    """The operator's own dense form against the definition."""
    for T, heads, gate in ((1, (1, 1), "none"), (33, (2, 4), "weak"), (64, (1, 3), "mixed")):
        given = op.without_state(Case(T, None, heads=heads, gate=gate, start=False))
        o = op.matrix(*(given[n] for n in op.names), 0.3)
        assert error(o, op.public(**given, scale=0.3, backend="reference")[0]) <= TOL


def check_rows_in_any_order(op: LogLinear) -> None:
    inputs = op.make(Case(30, 16, B=4))
    truth, final = op.run(inputs, "torch")
    slots, position = inputs.pop("initial_state"), torch.tensor(POSITIONS)
    order = torch.tensor([2, 0, 3, 1])
    given = {n: x[order] for n, x in inputs.items()}
    o, now = op.public(**given, initial_state=FenwickState(slots[order], position[order]), output_final_state=True)
    assert error(o, truth[order]) <= 1e-13
    assert error(now.slots, final[order]) <= 1e-13
    assert torch.equal(now.position, position[order] + 30)


def check_two_calls_are_one(op: LogLinear) -> None:
    """A state handed over after any number of tokens, rows at different positions, gradients included."""
    inputs = op.make(Case(70, 16, B=3))
    truth = contract.values(op, inputs, "reference")

    def parts(cut: int) -> Callable[..., tuple[Tensor, Tensor]]:
        def call(initial_state: Tensor, backend: str, output_final_state: bool, **given: Any) -> tuple[Tensor, Tensor]:
            first, second = ({n: x[:, at] for n, x in given.items()} for at in (slice(cut), slice(cut, None)))
            mask = live(POSITIONS[:3], initial_state.shape[2])
            o1, middle = op.public(**first, initial_state=state(initial_state * mask), output_final_state=True)
            o2, final = op.public(**second, initial_state=middle, output_final_state=True)
            return torch.cat([o1, o2], dim=1), final.slots

        return call

    for cut in (1, 3, 32, 52, 69):
        assert_close(values(replace(op, call=parts(cut)), inputs, "torch"), truth)


def check_prefill_then_steps(op: LogLinear) -> None:
    """A prefix of any length in one call, then token by token, is the definition; past what L levels tell apart too."""
    for T, L, gate, heads in ((40, 7, "mixed", (2, 4)), (35, 4, "none", (3, 3)), (20, 1, "weak", (1, 3))):
        given = op.without_state(Case(T, None, gate=gate, heads=heads, start=False), L=L)
        o, final = op.public(**given, output_final_state=True, backend="reference")
        for prefix in range(1, T):
            before = {n: None if x is None else x[:, :prefix] for n, x in given.items()}
            _, now = op.public(**before, output_final_state=True)
            end = T if prefix % 8 == 1 else prefix + 1
            y, now = steps(op, given, now, prefix, end)
            assert error(y, o[:, prefix:end]) <= TOL
            assert now.position.tolist() == [end] * 2
            assert end < T or error(now.slots, final.slots) <= TOL


def check_steps_from_ragged_positions(op: LogLinear) -> None:
    inputs = op.make(Case(20, None, B=4))
    o, final = op.run(inputs, "torch")
    y, now = steps(op, inputs, state(inputs["initial_state"]), 0, 20)
    assert error(y, o) <= TOL
    assert error(now.slots, final) <= TOL
    assert now.position.tolist() == [p + 20 for p in POSITIONS]


def steps(op: LogLinear, given: Inputs, now: Any, begin: int, end: int) -> tuple[Tensor, FenwickState]:
    os = []
    for t in range(begin, end):
        o, now = op.step(*(None if (x := given[n]) is None else x[:, t] for n in op.names), now)
        os.append(o)
    return torch.stack(os, dim=1), now


def check_equal_weights_are_the_parent(op: LogLinear) -> None:
    """Weights that are equal over levels, not over tokens and heads: o_t = c_t parent_t, and so are the gradients."""
    for T, gate in ((1, "weak"), (64, "none"), (100, "mixed")):
        given = op.without_state(Case(T, None, gate=gate, start=False))
        c = given["level_scale"][..., :1].clone()
        given["level_scale"] = c.expand_as(given["level_scale"])
        whole = contract.leaves(given)
        parents = contract.leaves(op.parents(given))
        o, truth = op.public(**whole)[0], c * op.parent(**parents)[0]
        assert error(o, truth) <= TOL
        names = [n for n, x in parents.items() if x is not None]
        found = torch.autograd.grad(o.sin().sum(), [whole[n] for n in names])
        expected = torch.autograd.grad(truth.sin().sum(), [parents[n] for n in names])
        assert all(error(*pair) <= TOL for pair in zip(found, expected, strict=True))


def check_one_weight_is_one_bucket(op: LogLinear) -> None:
    """A weight of 1 at level l alone reads the parent's output of that bucket's values; their sum is the parent."""
    given = op.without_state(Case(50, 16, start=False), L=7)
    t = torch.arange(50)
    total = torch.zeros_like(given["v"])
    for l in range(7):
        given["level_scale"] = torch.zeros_like(given["level_scale"])
        given["level_scale"][..., l] = 1
        o, _ = op.public(**given, chunk_size=16)
        total += o
        for i in (0, 1, 16, 31, 32, 49):
            inside = (level(torch.tensor(i), t, 7) == l) & (t <= i)
            bucket = op.parents(given) | {"v": given["v"] * inside.view(1, -1, 1, 1)}
            assert error(o[:, i], op.parent(**bucket)[0][:, i]) <= TOL
    assert error(total, op.parent(**op.parents(given))[0]) <= TOL


def check_levels_are_the_set_bits(op: LogLinear) -> None:
    """Token t reads level 0 and the levels l with bit l - 1 of t set: no other weight has a gradient, and the final
    slots hold nothing else."""
    for T in (1, 2, 64, 65, 100):
        given = contract.leaves(op.without_state(Case(T, 16, start=False), L=9))
        o, final = op.public(**given, chunk_size=16, output_final_state=True)
        (d,) = torch.autograd.grad(o.sin().sum(), given["level_scale"])
        set_bits = torch.tensor([[l == 0 or t >> (l - 1) & 1 for l in range(9)] for t in range(T)]).bool()
        assert torch.equal((d != 0).any(2).any(0), set_bits)
        assert torch.equal((final.slots != 0).flatten(3).any(3).any(1).any(0), set_bits[-1])


def check_gradients_balance(op: LogLinear) -> None:
    """o is linear in q and in the weights; a decay's gradient is what later outputs less later values account for."""
    given = contract.leaves(op.without_state(Case(100, 16, start=False)))
    o, _ = op.public(**given, chunk_size=16)
    weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(0), dtype=o.dtype)
    dq, dv, dscale, dg = torch.autograd.grad(
        (o * weight).sum(), [given[n] for n in ("q", "v", "level_scale", "log_decay")]
    )
    read = (o * weight).sum(-1)  # [B, T, H]
    assert error((given["level_scale"] * dscale).sum(-1), read) <= TOL
    assert error((given["q"] * dq).sum(-1), read.unflatten(2, (2, 2)).sum(-1)) <= TOL
    assert error(dg, (read - (given["v"] * dv).sum(-1)).flip(1).cumsum(1).flip(1)) <= TOL


def check_levels_beyond_share_the_last_weight(op: LogLinear) -> None:
    """L weights for a sequence of more levels are the last weight given to all the levels beyond."""
    for L in (1, 2, 4):
        few = op.without_state(Case(70, 16, start=False), L=L)
        last = few["level_scale"][..., -1:]
        many = few | {"level_scale": torch.cat([few["level_scale"][..., :-1], last.expand(-1, -1, -1, 10 - L)], dim=-1)}
        (o, final), (_, uncapped) = (op.public(**x, chunk_size=16, output_final_state=True) for x in (few, many))
        assert error(o, op.matrix(*(many[n] for n in op.names), 4**-0.5)) <= TOL
        assert error(final.slots[:, :, : L - 1], uncapped.slots[:, :, : L - 1]) <= TOL
        assert error(final.slots[:, :, L - 1], uncapped.slots[:, :, L - 1 :].sum(2)) <= TOL


def check_more_levels_or_tokens_change_nothing(op: LogLinear) -> None:
    long = op.without_state(Case(100, None, start=False), L=9)
    o, _ = op.public(**long)
    for T in (1, 2, 63, 64, 65):
        short = {n: x[:, :T] for n, x in long.items()}
        short["level_scale"] = short["level_scale"][..., : levels(T)]
        assert error(op.public(**short)[0], o[:, :T]) <= TOL


def check_packed(op: LogLinear) -> None:
    """Positions restart at every boundary, or go on from each sequence's own state; an empty sequence keeps its own."""
    bounds = (0, 1, 18, 18, 40, 41)
    given = op.without_state(Case(41, None, B=1, gate="mixed", start=False), L=5)
    cu_seqlens = torch.tensor(bounds)
    for backend in ("reference", "torch"):
        parts = [{n: x[:, a:b] for n, x in given.items()} for a, b in pairwise(bounds)]
        alone = [op.public(**part, output_final_state=True, backend=backend) for part in parts if part["v"].shape[1]]
        o, final = op.public(**given, cu_seqlens=cu_seqlens, output_final_state=True, backend=backend)
        assert error(o, torch.cat([y for y, _ in alone], dim=1)) <= TOL
        assert error(final.slots[[0, 1, 3, 4]], torch.cat([S.slots for _, S in alone])) <= TOL
        assert not final.slots[2].any()
        assert final.position.tolist() == [1, 17, 0, 22, 1]
        assert error(op.public(**given, cu_seqlens=cu_seqlens, backend=backend)[0], o) <= TOL
        again, last = op.public(
            **given, cu_seqlens=cu_seqlens, initial_state=final, output_final_state=True, backend=backend
        )
        assert torch.equal(last.slots[2], final.slots[2])
        twice = {n: torch.cat([x[:, 18:40]] * 2, dim=1) for n, x in given.items()}
        assert error(again[:, 18:40], op.public(**twice, backend="reference")[0][:, 22:]) <= TOL


def check_triton(op: LogLinear) -> None:
    """The public function over the kernels, interpreted or on a GPU: alone, packed, and with states around them."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = op.without_state(Case(22, None, B=1, heads=(1, 2), start=False), dtype=torch.float32, L=4)
    given = {n: x.to(device) for n, x in given.items()}
    bounds = torch.tensor([0, 3, 22], device=device)
    for options in ({}, {"cu_seqlens": bounds}, {"output_final_state": True}):
        (o, final), (truth, last) = (op.public(**given, **options, backend=b) for b in ("triton", "reference"))
        assert error(o, truth) <= 1e-5
        assert final is None or error(final.slots, last.slots) <= 1e-5


def check_state_errors(op: LogLinear) -> None:
    given = op.without_state(Case(4, None, start=False), L=3)
    slots, position = torch.zeros(2, 4, 3, 4, 3), torch.zeros(2, dtype=torch.int64)
    for wrong, message in (
        (FenwickState(slots[:, :, :2], position), r"the state's slots has shape \[2, 4, 2, 4, 3\]"),
        (
            FenwickState(slots, position[:1]),
            r"position has shape \[1\] and dtype torch.int64, expected int64 \[B\] = \[2\]",
        ),
        (FenwickState(slots, position.int()), r"position has shape \[2\] and dtype torch.int32"),
    ):
        with pytest.raises(UserError, match=message):
            op.public(**given, initial_state=wrong)
        with pytest.raises(UserError, match=message):
            op.step(*(given[n][:, 0] for n in op.names), wrong)
    with pytest.raises(
        UserError, match=r"level_scale has shape \[2, 4, 3, 3\], expected \[B, T, H, L\] = \[2, 4, 4, L\]"
    ):
        op.public(**given | {"level_scale": given["level_scale"][:, :, :3]})
    with pytest.raises(UserError, match="L = 0, expected at least 1"):
        op.public(**given | {"level_scale": given["level_scale"][..., :0]})


CHECKS = [
    *(check for check in contract.CHECKS if check not in WITH_POSITIONS_HERE),
    check_rows_in_any_order,
    check_matrix,
    check_two_calls_are_one,
    check_prefill_then_steps,
    check_steps_from_ragged_positions,
    check_equal_weights_are_the_parent,
    check_one_weight_is_one_bucket,
    check_levels_are_the_set_bits,
    check_gradients_balance,
    check_levels_beyond_share_the_last_weight,
    check_more_levels_or_tokens_change_nothing,
    check_packed,
    check_triton,
    check_state_errors,
]
