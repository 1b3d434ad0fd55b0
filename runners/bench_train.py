"""What a training step costs: milliseconds per model of a stack's step, beside a plain loop over the same model.

Ours is `Training.advance` as a sweep runs it, a step drawn, taken and updated, with its launches; the waits that a
sweep makes every 50 steps are left out. The plain loop is the usual way of writing it: one model, float32, eagerly,
logits at all positions, `torch.optim.AdamW`, on a batch that is there already; mixers are the same modules in both. No
time without a check: the first losses and gradients of the stack must be the plain model's.

On a GPU, kernels are compiled first, by several processes at a time.
"""

import gc
import inspect
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mixassay import provenance
from mixassay.mixers import mixer
from mixassay.mixers.parts.norm import EPS_LAYER, EPS_RMS, LayerNorm, RMSNorm
from mixassay.model import Block, Model
from mixassay.runners.bench_records import SCHEMA, Record
from mixassay.runners.bench_report import stacks_of
from mixassay.runners.graph import WARM
from mixassay.runners.stack import gradients
from mixassay.runners.timing import Failure, attempt, summary
from mixassay.runners.tolerance import LIMITS
from mixassay.runners.training import LOOK_EVERY, Training
from mixassay.spec import RunSpec
from mixassay.tasks import IGNORE


@dataclass(frozen=True)
class Setting:
    device: torch.device
    mixers: tuple[str, ...]
    widths: tuple[int, ...] = (16, 32, 64)
    pairs: tuple[int, ...] = (4, 64)
    stacks: tuple[int, ...] = (1, 5, 20, 40)
    T: int = 256
    batch: int = 256
    vocab_size: int = 8192
    precision: str = "bf16"
    baseline: bool = True
    budget: float = 0.4  # seconds for a row of steps


QUICK: dict[str, Any] = {"widths": (16,), "pairs": (4,), "stacks": (1, 2), "T": 32, "batch": 4, "budget": 0.01}
QUICK |= {"vocab_size": 64, "precision": "fp32"}


def bench_train(setting: Setting) -> Iterator[Record]:
    """Two records, ours and the plain loop's, for every mixer, width and number of pairs, as soon as they are there."""
    if setting.device.type == "cuda":
        compile_all(setting)
    device = torch.cuda.get_device_name(setting.device) if setting.device.type == "cuda" else "cpu"
    env = provenance.environment(device, threads=torch.get_num_threads())
    for name in setting.mixers:
        source = provenance.source_hash(["mixassay.runners.bench_train", f"mixassay.mixers.{name}"])
        code = provenance.code(source).model_dump()
        for d_model in setting.widths:
            for pairs in setting.pairs:
                for found in at(setting, name, d_model, pairs):
                    yield {**found, "code": code, "env": env}


def failed(record: Record) -> bool:
    """Whether one of ours has no number that it should have."""
    return bool(record["ours"]) and any(part["status"] != "ok" for part in stacks_of(record).values())


def at(setting: Setting, name: str, d_model: int, pairs: int) -> Iterator[Record]:
    begun = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    spec = specs(setting, name, d_model, pairs, 1)[0]
    shared = {
        "bench": "train",
        "schema": SCHEMA,
        "time": begun,
        "mixer": name,
        "model": spec.model.model_dump(mode="json", exclude_defaults=True),
        "arguments": spec.mixer.args,
        **{"d_model": d_model, "pairs": pairs, "T": setting.T, "B": setting.batch, "vocab_size": setting.vocab_size},
    }
    ours = {
        f"stack {count}": part(lambda count=count: stacked(setting, name, d_model, pairs, count))  # type: ignore[misc]
        for count in setting.stacks
    }
    yield {**shared, "implementation": "mixassay", "ours": True, "precision": setting.precision, **ours}
    if setting.baseline:
        step = part(lambda: plain(setting, name, d_model, pairs))
        yield {**shared, "implementation": "plain loop", "ours": False, "precision": "fp32", "step": step}


def part(measure: Callable[[], Record]) -> Record:
    found = attempt(measure)
    if torch.cuda.is_available():
        gc.collect()  # a training hangs in cycles, and with it the memory of its graphs
        torch.cuda.empty_cache()
    return found._asdict() if isinstance(found, Failure) else {"status": "ok", "reason": None, **found}


def stacked(setting: Setting, name: str, d_model: int, pairs: int, count: int) -> Record:
    """Milliseconds per model of a step of `count` models."""
    training = Training(specs(setting, name, d_model, pairs, count), setting.device.type)
    found = errors(training)
    for (name, error), limit in zip(found.items(), LIMITS[setting.precision], strict=True):
        if not error <= limit:
            reason = f"{name} differs from the plain model's by {error:.1e}, above {limit:g}"
            return {"status": "wrong", "reason": reason}
    reset_peak(setting.device)
    for _ in range(WARM + 2):
        training.advance()
    times = timed(training.advance, setting)
    return {"errors": found, **summary([ms / count for ms in times]), "peak_bytes": peak(setting.device)}


def plain(setting: Setting, name: str, d_model: int, pairs: int) -> Record:
    training = Training(specs(setting, name, d_model, pairs, 1), setting.device.type)
    tokens, positions, labels = training.first_rows()
    dense = torch.full_like(tokens[0], IGNORE).scatter_(1, positions[0], labels[0])
    model = training.stack.models[0].train()
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        loss = usual_loss(model, tokens[0], dense)
        optim.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optim.step()

    reset_peak(setting.device)
    for _ in range(3):
        step()
    return {**summary(timed(step, setting)), "peak_bytes": peak(setting.device)}


def usual_loss(model: Model, tokens: Tensor, labels: Tensor) -> Tensor:
    """labels int64 [B, T], IGNORE where nothing is scored."""
    x = model.embedding(tokens)
    if model.position is not None:
        x = x + model.position.weight[: tokens.shape[1]]
    for block in model.blocks:
        assert isinstance(block, Block)
        x = x + block.mixer(normed(x, block.norm))
        if block.norm2 is not None:
            x = x + normed(x, block.norm2)
    logits = F.linear(normed(x, model.norm), model.embedding.weight)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)


def normed(x: Tensor, norm: LayerNorm | RMSNorm) -> Tensor:
    if isinstance(norm, LayerNorm):
        return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, EPS_LAYER)
    return F.rms_norm(x, x.shape[-1:], norm.weight, EPS_RMS)


def errors(training: Training) -> dict[str, float]:
    """How far loss and gradient of a stack's first batch are from those of the plain model, relative: the worse of the
    first and the last model."""
    stack, (tokens, positions, labels) = training.stack, training.first_rows()
    losses, grads = stack.loss_and_grad(tokens, positions, labels, None)
    found = {"loss": 0.0, "gradient": 0.0}
    for row in {0, len(stack) - 1}:
        dense = torch.full_like(tokens[row], IGNORE).scatter_(1, positions[row], labels[row])
        model = stack.model(row)
        loss = usual_loss(model, tokens[row], dense)
        truth = {"loss": loss.detach(), "gradient": gradients(loss, list(model.parameters()), None)}
        for name, ours in (("loss", losses[row]), ("gradient", grads[row])):
            error = float((ours - truth[name]).norm() / truth[name].norm())
            found[name] = max(found[name], error if error < math.inf else math.inf)
    return found


def specs(setting: Setting, name: str, d_model: int, pairs: int, count: int) -> list[RunSpec]:
    """Two layers: attention with positions; Mamba-2 and its kin in their own block; all else behind a BaseConv."""
    model: dict[str, Any] = {"d_model": d_model, "n_layers": 2}
    if "mamba2" in name:
        model["block"] = "mamba"
    elif name == "attention":
        model["positions"] = "learned"
    elif name != "base_conv":
        model["hybrid"] = {"name": "base_conv"}
    task = {"name": "mqar", "vocab_size": setting.vocab_size, "seq_len": setting.T, "num_kv": pairs}
    given = {
        "task": {**task, "valid_examples": 1, "test_examples": 1},
        "mixer": {"name": name, **arguments(name, d_model, setting.T)},
        "model": model,
        "train": {"steps": 10_000, "batch_size": setting.batch, "precision": setting.precision},
        "suite": "bench",
    }
    return [RunSpec.model_validate(given | {"seed": seed}) for seed in range(count)]


def arguments(name: str, d_model: int, T: int) -> dict[str, Any]:
    """The published table's: heads and states of 16 in Mamba-2, else one head at width 16 and two above, as many levels
    as T tokens have; attention has one head."""
    known = inspect.signature(mixer[name]).parameters
    found: dict[str, Any] = {}
    if "d_state" in known:
        found |= {"d_state": 16, "head_dim": 16}
    elif "heads" in known and name != "attention" and d_model > 16:
        found["heads"] = 2
    if "levels" in known:
        found["levels"] = (T - 1).bit_length() + 1
    return found


# -- clocks ------------------------------------------------------------------------------------------------------------


def timed(step: Callable[[], None], setting: Setting) -> list[float]:
    """Milliseconds of a step, several times: of steps in a row, as a sweep takes them, shared equally. A row is as long
    as the budget allows, and at most what a sweep takes without waiting, so that a wait's share is what it is there."""
    (one,) = spans(step, setting, 1, 1)
    row = max(1, min(LOOK_EVERY, round(1e3 * setting.budget / max(one, 1e-3))))
    return spans(step, setting, row, 3 if one < 1e3 * setting.budget else 2)


def spans(step: Callable[[], None], setting: Setting, row: int, times: int) -> list[float]:
    found = []
    for _ in range(times):
        wait(setting.device)
        start = time.perf_counter()
        for _ in range(row):
            step()
        wait(setting.device)
        found.append(1e3 * (time.perf_counter() - start) / row)
    return found


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int | None:
    """The most memory held since; None on a CPU, which does not tell."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


# -- kernels, compiled beforehand --------------------------------------------------------------------------------------


def compile_all(setting: Setting) -> None:
    """Triton keeps what it has compiled on disk, where this process finds it."""
    todo = [(setting, name, d_model) for name in setting.mixers for d_model in setting.widths]
    workers = max(1, min(len(todo), (os.cpu_count() or 1) - 2))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_kernels, *zip(*todo, strict=True)))


def compile_kernels(setting: Setting, name: str, d_model: int) -> None:
    """By a step of two small models, and of the plain one. What fails here fails again where it is reported."""
    for pairs in setting.pairs:
        attempt(lambda pairs=pairs: Training(specs(setting, name, d_model, pairs, 2), "cuda").advance())  # type: ignore[misc]
        if setting.baseline:
            attempt(lambda pairs=pairs: errors(Training(specs(setting, name, d_model, pairs, 1), "cuda")))  # type: ignore[misc]
