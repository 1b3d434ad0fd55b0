"""What one more token costs: milliseconds and state of each mixer after T tokens.

Timed is the mixer's own `step`, each going on from the state that the one before left (after 64 from the first again),
as a caller waits for it: with its launches, and on CUDA once more as a graph, which has one and writes the same token
again. The state after T tokens is not reached by T steps but made: what grows with the tokens (seen by comparing two
steps) is drawn at length T, counters are set to T, all else is kept. First `step` is held to `forward` on a few tokens.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mixassay import provenance
from mixassay.mixers import Mixer, State, mixer, nbytes
from mixassay.runners.bench_records import SCHEMA, Record
from mixassay.runners.timing import Clock, Failure, attempt, summary

LIMIT = 1e-4
"""The largest |step - forward| / |forward| that passes, in float32."""
CHECKED = 37  # tokens
TOKENS = 64  # that are written before it begins anew behind T
HEAD_DIM = 64


@dataclass(frozen=True)
class Setting:
    device: torch.device
    mixers: tuple[str, ...]
    lengths: tuple[int, ...] = tuple(1024 << n for n in range(7))
    batch: int = 1
    d_model: int = 1024
    budget: float = 0.1  # seconds for each time


QUICK: dict[str, Any] = {"lengths": (64, 256), "d_model": 64, "budget": 0.01}


def bench_decode(setting: Setting) -> Iterator[Record]:
    """A record for every mixer and length, each as soon as it is there. Float32 throughout."""
    torch.backends.cuda.matmul.allow_tf32 = False
    clock = Clock(setting.device, setting.budget, launches=True)
    device = torch.cuda.get_device_name(setting.device) if setting.device.type == "cuda" else "cpu"
    env = provenance.environment(device, threads=torch.get_num_threads())
    for name in setting.mixers:
        source = provenance.source_hash(["mixassay.runners.bench_decode", f"mixassay.mixers.{name}"])
        code = provenance.code(source).model_dump()
        model = attempt(lambda name=name: build(name, setting))  # type: ignore[misc]
        error = model if isinstance(model, Failure) else attempt(lambda m=model: step_error(m))  # type: ignore[misc]
        for T in setting.lengths:
            found: Record = {"status": "ok", "reason": None}
            if isinstance(error, Failure):
                found = error._asdict()
            elif not error <= LIMIT:
                found = {"status": "wrong", "reason": f"step differs from forward by {error:.1e}, above {LIMIT:g}"}
            else:
                assert isinstance(model, Mixer)
                measured = attempt(lambda m=model, T=T: measure(m, T, setting, clock))  # type: ignore[misc]
                found |= measured._asdict() if isinstance(measured, Failure) else measured
            yield {
                "bench": "decode",
                "schema": SCHEMA,
                "time": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
                "mixer": name,
                "arguments": arguments(name, setting.d_model),
                "T": T,
                "B": setting.batch,
                "d_model": setting.d_model,
                "dtype": "float32",
                "error": None if isinstance(error, Failure) or error != error else error,
                **found,
                "code": code,
                "env": env,
            }


def arguments(name: str, d_model: int) -> dict[str, Any]:
    """Heads of HEAD_DIM channels where a mixer asks for heads, else its defaults."""
    return {"heads": max(1, d_model // HEAD_DIM)} if "heads" in inspect.signature(mixer[name]).parameters else {}


def build(name: str, setting: Setting) -> Mixer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = mixer[name](setting.d_model, **arguments(name, setting.d_model))
    return model.to(setting.device).requires_grad_(False)


def step_error(model: Mixer) -> float:
    """How far a few steps are from `forward`, relative."""
    x = tokens(model, 1, CHECKED)
    state, steps = model.init_state(1), []
    for x_t in x.unbind(1):
        y, state = model.step(x_t, state)
        steps.append(y)
    whole = model(x)
    return float((torch.stack(steps, dim=1) - whole).norm() / whole.norm())


def measure(model: Mixer, T: int, setting: Setting, clock: Clock) -> Record:
    start = state = state_after(model, T, setting.batch)
    (x,) = tokens(model, setting.batch, 1).unbind(1)
    kept, taken = nbytes(start) // setting.batch, 0

    def run() -> Any:
        nonlocal state, taken
        taken += 1
        y, state = model.step(x, state if taken % TOKENS else start)
        return y, state

    runs = {"eager": run}
    captured = attempt(lambda: graphed(run)) if setting.device.type == "cuda" else Failure("unsupported", "no CUDA")
    if not isinstance(captured, Failure):
        runs["cuda_graph"] = captured
    times = clock.compare(runs)
    sparse = type(model).live_state_bytes is not Mixer.live_state_bytes  # else all is live, and counting takes T steps
    found: Record = {
        "state_bytes": kept,
        "live_state_bytes": model.live_state_bytes(T) if sparse else kept,
        "cuda_graph": captured._asdict() if isinstance(captured, Failure) else None,
    }
    for name, samples in times.items():
        found[name] = samples._asdict() if isinstance(samples, Failure) else {"status": "ok", **summary(samples)}
    return found if found["eager"]["status"] == "ok" else {**found, **found["eager"]}


def state_after(model: Mixer, T: int, batch: int) -> State:
    """A state as it is after T tokens, made without taking T steps."""
    x = tokens(model, batch, 3)
    state = model.init_state(batch)
    seen = []
    for x_t in x.unbind(1)[:2]:
        _, state = model.step(x_t, state)
        seen.append(pytree.tree_flatten(state))
    (before, _), (after, structure) = seen
    leaves = [grown(a, b, T - 1) for a, b in zip(before, after, strict=True)]
    _, state = model.step(x[:, 2], pytree.tree_unflatten(leaves, structure))  # a window is cut to its width here
    return state


def grown(one: Tensor, two: Tensor, T: int) -> Tensor:
    """What a leaf of the state is after T tokens, judging by what it is after one and after two."""
    if one.shape != two.shape:
        shape = [T if a != b else b for a, b in zip(one.shape, two.shape, strict=True)]
        return torch.randn(shape, dtype=two.dtype, device=two.device)
    if not two.is_floating_point() and bool((two == one + 1).all()):
        return torch.full_like(two, T)
    return two


def graphed(run: Any) -> Any:
    """Captured once, to be replayed: what it costs when no time goes to launching."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()

    def replay() -> Any:
        graph.replay()
        return kept

    return replay


def tokens(model: Mixer, batch: int, T: int) -> Tensor:
    like = next(model.parameters())
    draw = torch.Generator().manual_seed(1)
    return torch.randn(batch, T, model.d_model, generator=draw).to(like)
