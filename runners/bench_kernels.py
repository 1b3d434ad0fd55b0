"""The operators' speed, next to other implementations of the same function in the same process.

No time without a check, and what is timed is the very function that was checked. Output and all gradients are compared
with a float64 truth twice: on a ragged number of few tokens with the definition, token by token; and on the inputs
that will be timed with the torch form, for the last head of the last sequence, where offsets are largest. One of ours
that fails either is not timed. A peer is judged on the inputs that are timed; if it fails, its time stands in the
record, marked as wrong.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mixassay import provenance
from mixassay.runners import floors
from mixassay.runners.bench_records import PASSES, SCHEMA, Record
from mixassay.runners.operators import ARGUMENTS, Call, Inputs, Shape, draw, gate_bytes, home, operator
from mixassay.runners.peers import Implementation, peers
from mixassay.runners.timing import Clock, Failure, attempt, summary

LIMITS = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4}
"""The largest |x - truth| / |truth|, Euclidean over a tensor, that passes: some roundings of the dtype."""

Tensors = dict[str, Tensor]
"""The output "o", and "dq" for the gradient of "q"."""
Errors = dict[str, float | None]
"""Of the same. None: not finite. Empty: there was no truth to compare with (no memory for it)."""


@dataclass(frozen=True)
class Setting:
    """What to measure. Each length is measured with `tokens` tokens in all, at least one sequence."""

    device: torch.device
    ops: tuple[str, ...] = tuple(ARGUMENTS)
    lengths: tuple[int, ...] = tuple(2048 << n for n in range(7))
    heads: Mapping[int, int] = field(default_factory=lambda: {64: 16, 128: 8})  # width D of a head -> heads
    tokens: int = 65536
    dtype: torch.dtype = torch.bfloat16
    with_peers: bool = True
    checked: int = 301  # tokens of the short check
    budget: float = 0.1  # seconds for each time


QUICK: dict[str, Any] = {"lengths": (128, 256), "heads": {64: 2}, "tokens": 512, "checked": 77, "budget": 0.01}
CPU: dict[str, Any] = {"lengths": (2048, 4096, 8192), "tokens": 8192}
"""Settings in which a laptop, or a CPU, needs seconds or minutes."""


@dataclass(eq=False)
class Entry:
    """One pass of one implementation at one shape, and what became of it."""

    by: Implementation
    which: str  # of PASSES
    limit: float
    short: Errors | Failure
    timed: Errors | Failure
    times: list[float] | Failure = field(default_factory=list)
    launch_ms: float | None = None  # of the CPU
    peak_bytes: int | None = None

    def failure(self) -> Failure | None:
        """Why it did not pass its checks, or could not be timed."""
        judged = [self.timed, self.short] if self.by.ours or self.timed == {} else [self.timed]
        for found in judged:
            if isinstance(found, Failure):
                return found
            wrong = {name: e for name, e in found.items() if e is None or e > self.limit}
            if wrong:
                shown = ", ".join(f"{name} {'not finite' if e is None else f'{e:.1e}'}" for name, e in wrong.items())
                return Failure("wrong", f"relative error above {self.limit:g}: {shown}")
        return self.times if isinstance(self.times, Failure) else None

    def record(self, tokens: int, floor_ms: float | None) -> Record:
        failure = self.failure()
        found: Record = {
            "status": failure.status if failure else "ok",
            "reason": failure.reason if failure else None,
            "errors": {
                name: {} if isinstance(errors, Failure) else errors
                for name, errors in (("short", self.short), ("timed", self.timed))
            },
        }
        if isinstance(self.times, Failure) or not self.times:
            return found
        times = summary(self.times)
        return {
            **found,
            **times,
            "tokens_per_s": 1e3 * tokens / times["ms"],
            "floor_ms": floor_ms,
            "fraction_of_floor": floor_ms / times["ms"] if floor_ms else None,
            "launch_ms": self.launch_ms,
            "peak_bytes": self.peak_bytes,
        }


class Sample(NamedTuple):
    """Inputs, the gradient of the output, and the truth in that `part` of each result where it is known."""

    inputs: Inputs
    do: Tensor
    true: Tensors | Failure
    part: Callable[[Tensor], Tensor]


def bench_kernels(setting: Setting) -> Iterator[Record]:
    """A record for every operator, head size, length and implementation, each as soon as it is there."""
    if setting.device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False  # float32 is float32
    clock = Clock(setting.device, setting.budget)
    rates = clock.rates(setting.dtype)
    for op in setting.ops:
        made_by = {"rates": rates and rates._asdict(), **provenance_of(op, setting.device)}
        for D, H in setting.heads.items():
            few = few_tokens(op, D, setting)
            candidates = [ours(op, few), *(peers(op, setting.device) if setting.with_peers else ())]
            short = {(c.name, which): check(c, which, few) for c in candidates for which in PASSES}
            if isinstance(few.true, Failure):  # what was never held to the definition is not timed
                short = dict.fromkeys(short, few.true._replace(reason=f"no truth to check against: {few.true.reason}"))
            del few
            for T in setting.lengths:
                shape = Shape(max(1, setting.tokens // T), T, H, D)
                for record in at(op, candidates, shape, short, setting, clock, rates):
                    yield {**record, **made_by}


def failed(record: Record) -> bool:
    """Whether one of ours has no number that it should have."""
    return bool(record["ours"]) and any(record[which]["status"] != "ok" for which in PASSES)


def ours(op: str, few: Sample) -> Implementation:
    """Triton where it can serve, else torch, with the reason."""
    if not few.do.is_cuda:  # where Triton would be its interpreter
        return Implementation("mixassay torch", operator(op, "torch"), ours=True, note="no CUDA device")
    triton = Implementation("mixassay triton", operator(op, "triton"), ours=True)
    tried = check(triton, "forward", few)
    if isinstance(tried, Failure) and tried.status == "unsupported":
        return Implementation("mixassay torch", operator(op, "torch"), ours=True, note=tried.reason)
    return triton


def provenance_of(op: str, device: torch.device) -> Record:
    source = provenance.source_hash(["mixassay.runners.bench_kernels", home(op)])
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    env = provenance.environment(name, threads=torch.get_num_threads())
    return {"code": provenance.code(source).model_dump(), "env": env}


def at(
    op: str,
    candidates: Sequence[Implementation],
    shape: Shape,
    short: Mapping[tuple[str, str], Errors | Failure],
    setting: Setting,
    clock: Clock,
    rates: floors.Rates | None,
) -> Iterator[Record]:
    """All implementations of an operator on the same inputs of one shape: checked, then timed in turns."""
    begun = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()
    limit, many = LIMITS[setting.dtype], many_tokens(op, shape, setting)
    entries = [Entry(c, p, limit, short[c.name, p], check(c, p, many)) for c in candidates for p in PASSES]
    failures = {e: e.failure() for e in entries}
    wrong = {e.by.name for e, failure in failures.items() if e.by.ours and failure and failure.status == "wrong"}
    runs = {
        e: partial(outcome, e.by.call, many.inputs, many.do, e.which)
        for e, failure in failures.items()
        if e.by.call and e.by.name not in wrong and (failure is None or failure.status == "wrong")
    }
    for e, times in clock.compare(runs).items():
        e.times = times
        if not isinstance(times, Failure):
            launch, peak = (attempt(partial(measure, runs[e])) for measure in (clock.launch_ms, clock.peak_bytes))
            e.launch_ms = None if isinstance(launch, Failure) else launch
            e.peak_bytes = None if isinstance(peak, Failure) else int(peak) if peak is not None else None
    floor = floor_ms(op, shape, many.inputs, rates) if rates else {}
    for c in candidates:
        yield {
            "bench": "kernels",
            "schema": SCHEMA,
            "time": begun,
            "op": op,
            "implementation": c.name,
            "ours": c.ours,
            "version": c.version,
            "note": c.note if c.call else None,
            **shape._asdict(),
            "dtype": str(setting.dtype).removeprefix("torch."),
            "limit": limit,
            "checked": setting.checked,
            "unchecked": many.true.reason if isinstance(many.true, Failure) else None,
            **{e.which: e.record(shape.B * shape.T, floor.get(e.which)) for e in entries if e.by is c},
        }


def floor_ms(op: str, shape: Shape, inputs: Inputs, rates: floors.Rates) -> dict[str, float]:
    """pass -> the least milliseconds it can take."""
    sizes: Any = {"width": inputs["q"].element_size(), "gates": gate_bytes(inputs)}
    works = [f(op, shape.T, shape.D, shape.D, **sizes) for f in (floors.forward, floors.backward)]
    forward, backward = (floors.ms(work, rates, shape.B * shape.T * shape.H) for work in works)
    return dict(zip(PASSES, (forward, forward + backward), strict=True))


def outcome(call: Call, inputs: Inputs, do: Tensor, which: str) -> Tensors:
    """What one pass computes: this is checked, and this is timed."""
    if which == "forward":
        with torch.no_grad():
            return {"o": call(inputs)}
    o = call(inputs)
    gradients = torch.autograd.grad(o, list(inputs.values()), do)
    return {"o": o.detach(), **{f"d{name}": g for name, g in zip(inputs, gradients, strict=True)}}


# -- checks ------------------------------------------------------------------------------------------------------------


def few_tokens(op: str, D: int, setting: Setting) -> Sample:
    """To be compared with the definition."""
    inputs, do = draw(op, Shape(1, setting.checked, 2, D), setting.dtype, setting.device, seed=0)
    return Sample(inputs, do, attempt(lambda: truth(op, inputs, do, "reference")), lambda x: x)


def many_tokens(op: str, shape: Shape, setting: Setting) -> Sample:
    """To be timed, and compared with the torch form of the last head of the last sequence: operators treat each head
    on its own."""
    inputs, do = draw(op, shape, setting.dtype, setting.device, seed=1)
    head = {name: last_head(x) for name, x in inputs.items()}
    return Sample(inputs, do, attempt(lambda: truth(op, head, last_head(do), "torch")), last_head)


def last_head(x: Tensor) -> Tensor:
    return x[-1:, :, -1:]


def check(c: Implementation, which: str, sample: Sample) -> Errors | Failure:
    """The errors of one pass, where the truth is known."""
    call, true = c.call, sample.true
    if call is None:
        return Failure("unsupported", c.note or "")

    def compare() -> Errors:
        found = outcome(call, sample.inputs, sample.do, which)
        if isinstance(true, Failure):
            return {}
        return {name: error(sample.part(x), true[name]) for name, x in found.items()}

    return attempt(compare)


def error(x: Tensor, true: Tensor) -> float | None:
    distance = float((x.double() - true).norm() / true.norm())
    return distance if distance < float("inf") else None


def truth(op: str, inputs: Inputs, do: Tensor, backend: str) -> Tensors:
    """Output and gradients in float64, from the same rounded inputs."""
    wide = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    call = softmax_by_rows if op == "softmax_attention" and backend == "torch" else operator(op, backend)
    return outcome(call, wide, do.double(), "forward_backward")


def softmax_by_rows(inputs: Inputs, rows: int = 1024) -> Tensor:
    """Attention with its T x T matrix in blocks of rows, recomputed in the backward, so that any T fits."""

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bihk,bjhk->bhij", q, k) * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + k.shape[1] - q.shape[1])
        return torch.einsum("bhij,bjhv->bihv", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)

    q, k, v = (inputs[name] for name in "qkv")
    stretches = [slice(start, start + rows) for start in range(0, q.shape[1], rows)]
    parts = [(q[:, t], k[:, : t.stop], v[:, : t.stop]) for t in stretches]
    return torch.cat([checkpoint(block, *part, use_reentrant=False) for part in parts], dim=1)
