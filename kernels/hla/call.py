"""What the five operators do alike: checks, feature map, mask, default decays, choice of the backend, ratio, dtypes."""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Generic

import torch
from torch import Tensor
from torch.nn.functional import pad

from mixassay.kernels import resolve
from mixassay.kernels.common.feature_maps import EPS, FEATURE_MAPS, NON_NEGATIVE, FeatureMap
from mixassay.kernels.common.precision import accumulator, no_autocast
from mixassay.kernels.common.registered import against_triton, operand_dtype
from mixassay.kernels.common.sequences import check_packed, wide_heads
from mixassay.kernels.common.shapes import Axes
from mixassay.kernels.hla.composed import Composed
from mixassay.kernels.hla.reference import Token, recurrence
from mixassay.kernels.hla.state import AXES, State, empty
from mixassay.kernels.hla.tokens import Tokens, per_head
from mixassay.kernels.linear_attention import linear_attention


@dataclass(frozen=True)
class Form(Generic[State]):
    """An operator, and the options that belong to its meaning."""

    name: str
    state: type[State]
    token: Token[State]
    composed: Composed[State]
    power: int  # the outer log decay is so many times the inner one, unless it is given
    scale: float | None
    feature_map: FeatureMap
    normalize: bool
    ridge: float = 0.0
    fused: bool = False  # it has kernels of its own

    def is_fused(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether those serve a call. They were made for bfloat16; float64 is for tests in Triton's interpreter."""
        narrow = max(q.shape[-1], v.shape[-1]) <= FUSED_WIDTH
        made_for = operand_dtype(q, k, v) in (torch.bfloat16, torch.float64)
        return self.fused and not self.normalize and narrow and made_for


FUSED_WIDTH = 128


def whole(
    form: Form[State],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    outer_log_decay: Tensor | None,
    mask: Tensor | None,
    initial_state: State | None,
    output_final_state: bool,
    chunk_size: int | None,
    cu_seqlens: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, State | None]:
    """All tokens of a call: the operators' arguments, as their docstrings say."""
    axes = Axes(form.name)
    _check(axes, form, "BT", q, k, v, log_decay, outer_log_decay)
    axes.check_positive("T", q.shape[1])
    axes.check_positive("chunk_size", chunk_size)
    if cu_seqlens is not None:
        check_packed(axes, cu_seqlens, "q", q)
    if mask is not None and (mask.shape != q.shape[:2] or mask.dtype != torch.bool):
        found = f"mask has shape {list(mask.shape)} and dtype {mask.dtype}"
        axes.fail(f"{found}, expected bool [B, T] = {list(q.shape[:2])}")
    if initial_state is not None:
        _check_state(axes, form, "initial_state", initial_state, "B" if cu_seqlens is None else "N")

    values = pad(v, (0, 1), value=1.0) if form.normalize else v
    given = (q, k, values, log_decay, outer_log_decay)
    against = against_triton(*given, *(initial_state or ())) or wide_heads(q, values)
    chosen = resolve(form.name, backend, against_triton=against)
    with nullcontext() if chosen == "triton" else no_autocast(q):
        if chosen != "triton":  # the kernels choose their operands' dtype themselves
            dtype = accumulator(*given, *(initial_state or ()))
            given = _cast(given, dtype)
            initial_state = None if initial_state is None else _as(initial_state, dtype)
        x, scale = _tokens(form, given, mask), _scale(form, q)
        final: State | None
        if chosen == "reference":
            rows = axes.size["B" if cu_seqlens is None else "N"]
            start = initial_state or empty(form.state, x.v, **axes.size | {"B": rows})
            o, final = _recurrence(form, x, scale, start, cu_seqlens)
        elif chosen == "triton" and form.is_fused(q, k, v):
            from mixassay.kernels.hla import registered  # the package triton may not be there

            o, final = registered.hla(form.state, x, scale, form.ridge, initial_state, cu_seqlens, output_final_state)
        else:
            la = partial(
                linear_attention,
                output_final_state=output_final_state,
                chunk_size=chunk_size,
                cu_seqlens=cu_seqlens,
                backend=chosen,
            )
            o, final = form.composed(la, x, scale, initial_state)
        return _ratio(form, o).to(v.dtype), final if output_final_state else None


def step(
    form: Form[State],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    outer_log_decay: Tensor | None,
    state: State,
) -> tuple[Tensor, State]:
    """One token; the new state has the old one's dtypes."""
    axes = Axes(f"{form.name}_step")
    _check(axes, form, "B", q, k, v, log_decay, outer_log_decay)
    _check_state(axes, form, "state", state, "B")
    values = pad(v, (0, 1), value=1.0) if form.normalize else v
    given = (q, k, values, log_decay, outer_log_decay)
    dtype = accumulator(*given, *state)
    with no_autocast(q):
        x = _tokens(form, _cast(given, dtype), None)
        o, new = form.token(x, _scale(form, q), _as(state, dtype))
        return _ratio(form, o).to(v.dtype), form.state(*(n.to(s.dtype) for n, s in zip(new, state, strict=True)))


Given = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def _tokens(form: Form[State], given: Given, mask: Tensor | None) -> Tokens:
    """What the forms read. Padded tokens write zeros, read zeros and do not decay."""
    q, k, v, inner, outer = given
    if form.feature_map != "identity":
        phi = FEATURE_MAPS[form.feature_map]
        q, k = (phi(x.to(accumulator(x))).to(x.dtype) for x in (q, k))
    heads = q.dim() - 2
    if inner is not None:
        inner = inner.expand(k.shape[:-1])
        outer = form.power * per_head(inner, q, heads) if outer is None else outer
    if outer is not None:
        outer = outer.expand(q.shape[:-1])
    if mask is not None:
        padded = ~mask.unsqueeze(-1)
        q, k, v = (x.masked_fill(padded.unsqueeze(-1), 0) for x in (q, k, v))
        inner, outer = (None if x is None else x.masked_fill(padded, 0) for x in (inner, outer))
    return Tokens(q, k, v, inner, outer)


def _recurrence(
    form: Form[State], x: Tokens, scale: float, start: State, cu_seqlens: Tensor | None
) -> tuple[Tensor, State]:
    """The definition, on one packed sequence after the other."""
    if cu_seqlens is None:
        o, state = recurrence(form.token, x, scale, start)
        return torch.stack(o, dim=1), state
    os, states = [], []
    for n, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        before = form.state(*(s[n : n + 1] for s in start))
        o, state = recurrence(form.token, x.at(slice(begin, end)), scale, before)
        os += o
        states.append(state)
    return torch.stack(os, dim=1), form.state(*map(torch.cat, zip(*states, strict=True)))


def _ratio(form: Form[State], o: Tensor) -> Tensor:
    if not form.normalize:
        return o
    o = o.to(accumulator(o))
    return o[..., :-1] / (o[..., -1:] + EPS)


def _scale(form: Form[State], q: Tensor) -> float:
    return 1 / math.sqrt(q.shape[-1]) if form.scale is None else form.scale


def _cast(given: Given, dtype: torch.dtype) -> Given:
    q, k, v, *gates = given
    inner, outer = (None if x is None else x.to(dtype) for x in gates)
    return q.to(dtype), k.to(dtype), v.to(dtype), inner, outer


def _check(
    axes: Axes,
    form: Form[State],
    rows: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    outer_log_decay: Tensor | None,
) -> None:
    """`rows` are the axes before the heads. Binds W, the columns of the states that hold values."""
    axes.check("q", q, f"{rows}HK")
    axes.check("k", k, f"{rows}GK")
    axes.check("v", v, f"{rows}GV")
    for name, x, heads in (("log_decay", log_decay, "G"), ("outer_log_decay", outer_log_decay, "H")):
        if x is not None:
            axes.check(name, x, heads if x.dim() == 1 else f"{rows}{heads}")
    axes.check_groups("k", "q")
    axes.size["W"] = v.shape[-1] + form.normalize
    if form.feature_map not in FEATURE_MAPS:
        axes.fail(f'feature_map "{form.feature_map}", expected one of {", ".join(FEATURE_MAPS)}')
    if form.normalize and form.feature_map not in NON_NEGATIVE:
        axes.fail(
            f'normalize=True with feature_map "{form.feature_map}": its weights change sign, and so does their sum, '
            f"the denominator; expected one of {', '.join(NON_NEGATIVE)}"
        )


def _check_state(axes: Axes, form: Form[State], name: str, state: State, rows: str) -> None:
    if not isinstance(state, form.state):
        axes.fail(f"{name} is a {type(state).__name__}, expected a {form.state.__name__}")
    for field, x, letters in zip(form.state._fields, state, AXES[form.state], strict=True):  # type: ignore[attr-defined]
        axes.check(f"{name}.{field}", x, letters.replace("B", rows))


def _as(state: State, dtype: torch.dtype) -> State:
    return type(state)(*(s.to(dtype) for s in state))
