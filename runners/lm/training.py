"""A language model between two steps, and how it ends. Every rank of a run holds one; only the first evaluates.

Parameters and AdamW's moments are float32 whatever the precision; `bf16` multiplies under autocast. A step adds up the
gradients of its micro-batches, by CUDA graphs where one GPU trains alone. Rows depend on the step and the seed alone,
so a checkpoint is continued bit for bit on a CPU, also by another number of ranks up to the order of sums.
"""

import contextlib
import hashlib
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mixassay import draws
from mixassay.errors import UserError
from mixassay.kernels.common.precision import cast, rounding
from mixassay.mixers import Mixer, nbytes
from mixassay.model import Model, build
from mixassay.runners import checkpoint
from mixassay.runners.graph import WARM, Replay
from mixassay.runners.lm import first_step, work
from mixassay.runners.lm.batches import Batches, makers
from mixassay.runners.lm.evaluate import Questions, evaluate, observe, questions
from mixassay.runners.lm.loss import row_losses
from mixassay.runners.lm.ranks import Ranks
from mixassay.runners.memory import out_of_memory
from mixassay.runners.outcome import Outcome
from mixassay.runners.schedule import schedule
from mixassay.runners.stream import Stream, changes
from mixassay.runners.tolerance import LAST
from mixassay.spec import RunSpec, Stop, digest, problems

LOOK_EVERY = 10
"""Steps between looks at the clock and at whether the run has diverged: each waits for the device."""

MICRO_TOKENS = 2**16
"""Tokens of a micro-batch on a GPU, unless `run.micro_batch` says how many rows."""


@dataclass(frozen=True)
class End:
    reason: str
    broken: bool = False


class RowSums(nn.Module):
    """What a rank differentiates: the sum of its rows' losses."""

    def __init__(self, model: Model, precision: str) -> None:
        super().__init__()
        self.model, self.precision = model, precision

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with cast(tokens.device.type, self.precision):
            loss: Tensor = self.model(tokens, head=row_losses(labels)).sum()
        return loss


class Training:
    """One run on one rank. Raises UserError for what cannot be trained so."""

    def __init__(
        self, spec: RunSpec, device: str, ranks: Ranks, micro_batch: int | None = None, compiled: bool = False
    ) -> None:
        for _, message in problems(spec):
            raise UserError(message)
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        self.spec, self.train, self.device, self.ranks = spec, spec.train, device, ranks
        self.stream = Stream(spec.task, spec.train)
        self.part = ranks.part(spec.train.batch_size)
        self.rows = self.part.stop - self.part.start
        self.seq_len = max(cell.task.seq_len for cell in self.stream.cells)
        self.micro = micro_batch or (self.rows if device == "cpu" else max(1, MICRO_TOKENS // self.seq_len))
        self.valid: list[Questions] = questions(spec.task, "valid") if ranks.first else []
        self.model = self._build()
        if compiled:
            for block in self.model.blocks:
                block.compile()
        self.wrapped = ranks.wrap(RowSums(self.model, spec.train.precision))
        self.replay = Replay(self._add_gradients, device if ranks.n == 1 else "cpu")  # DDP's hooks are not captured
        self.optim = self._optimiser()
        self.flops = self._flops_per_token()
        self.step = 0
        self.tokens = 0  # of this process's steps
        self.broke_at = torch.full((), -1, device=device)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)  # over the steps since the last validation
        self.loss_steps = 0
        self.curve: dict[str, list[float]] = {"step": [], "train/loss": []}
        self.eval_every = spec.train.eval_every or max(1, self.stream.steps // (spec.train.epochs or 10))
        self.seconds = self.training_seconds = 0.0
        self.clock = Clock()
        self.found: tuple[list[Any], list[Any], dict[str, float]] = ([], [], {})  # of the last validation
        self.first_errors: dict[str, float] = {}  # of the first gradient, where it was checked (`first_step`)
        self.states: dict[str, int] | None = None  # their bytes, by the length of the evaluation rows
        self._batches: Iterator[tuple[Tensor, Tensor]] | None = None

    def try_out(self) -> None:
        """Before the first step: what is asked of a mixer behind the last, lest it fail there."""
        self.states = self._state_bytes()
        row = [Questions(cell.label, cell.rows.map(lambda x: x[:1])) for cell in self.valid[:1]]
        observe(self.model, row, "valid", self.device, self.train.precision)

    def check(self) -> None:
        """Before the first step. Raises WrongStep where its gradient is wrong."""
        self.first_errors = first_step.errors(self.model, self.spec, self.stream)
        if self.device != "cpu":  # `peak_bytes` is of training
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def advance(self) -> None:
        """One step."""
        start = time.perf_counter()
        if self._batches is None:
            batches = Batches(self.stream, self.spec.seed, self.part)
            self._batches = batches.of(self.device, self.step, makers(self.device))
        tokens, labels = next(self._batches)
        pieces = list(zip(torch.split(tokens, self.micro), torch.split(labels, self.micro), strict=True))
        for i, piece in enumerate(pieces):
            with self.ranks.apart(self.wrapped) if i < len(pieces) - 1 else contextlib.nullcontext():
                self.loss_sum += self.replay(*piece)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.train.clip or math.inf)
        self.broke_at = torch.where((self.broke_at < 0) & ~torch.isfinite(norm), self.step, self.broke_at)
        for group in self.optim.param_groups:
            group["lr"] = self.train.lr * schedule(self.train.schedule, self.step, self.stream.steps, self.train.warmup)
        self.optim.step()
        self.optim.zero_grad(set_to_none=not self.replay.on)
        self.loss_steps += 1
        self.step += 1
        self.tokens += self.train.batch_size * tokens.shape[1]
        self.clock.step(tokens.shape[1], WARM + 1 if self.replay.on else 1)  # the next one makes a graph
        took = time.perf_counter() - start
        self.seconds += took
        self.training_seconds += took
        looks = self._due(LOOK_EVERY) or self._due(self.eval_every)
        if looks:
            self._wait()
        if looks or self.device == "cpu":
            self.clock.look(self.tokens, self.training_seconds)

    def _wait(self) -> None:
        """For the device: what it has still to do of the steps before is training, and not what comes after it."""
        if self.device != "cpu":
            start = time.perf_counter()
            torch.cuda.synchronize()
            took = time.perf_counter() - start
            self.seconds += took
            self.training_seconds += took

    def _add_gradients(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Of a micro-batch, to those that are there; its share of the loss."""
        with rounding(self.train.precision):
            loss: Tensor = self.wrapped(tokens, labels) / self.rows
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def settle(self) -> End | None:
        """After a step: validates where that is due, on the first rank, and says whether the run ends here. Every rank
        must call it; the first one's answer counts."""
        validate = self._due(self.eval_every)
        if not validate and not self._due(LOOK_EVERY):
            return None
        start = time.perf_counter()
        end = self._validate() if validate else None
        if self.broke_at.item() >= 0:
            end = End("loss or gradient not finite", broken=True)
        self.seconds += time.perf_counter() - start
        return end

    def _validate(self) -> End | None:
        trained = self.ranks.mean(self.loss_sum).item() / self.loss_steps
        self.loss_sum.zero_()
        self.loss_steps = 0
        if not self.ranks.first:
            return None
        self.found = evaluate(self.model, self.valid, "valid", self.device, self.train.precision)
        valid = self.found[2]
        self.curve["step"].append(self.step)
        self.curve["train/loss"].append(trained)
        for name, value in valid.items():
            self.curve.setdefault(name, []).append(value)
        if not math.isfinite(valid["valid/loss"]):
            return End("validation loss not finite", broken=True)
        if self.train.stop is not None and reached(self.train.stop, valid):
            return End(f"{self.train.stop.metric} reached {valid[self.train.stop.metric]:.4g}")
        return End("steps") if self.step == self.stream.steps else None

    def outcome(self, end: End) -> Outcome:
        """Tests a model that ends well."""
        start, speed = time.perf_counter(), self.speed()
        cells, positions, metrics = [], [], {}
        if not end.broken:
            tested = evaluate(self.model, questions(self.spec.task, "test"), "test", self.device, self.train.precision)
            cells, positions = self.found[0] + tested[0], self.found[1] + tested[1]
            seen = observe(self.model, self.valid, "valid", self.device, self.train.precision)
            metrics = self.found[2] | tested[2] | seen | self.first_errors | self._last_errors()
        step = int(self.broke_at) + 1 if self.broke_at.item() >= 0 else self.step
        self.seconds += time.perf_counter() - start
        return Outcome(
            spec=self.spec,
            status="diverged" if end.broken else "ok",
            metrics=metrics,
            eval=cells,
            curve=self.curve,
            stopped={"step": step, "reason": end.reason},
            state_bytes=self._state_bytes() if self.states is None else self.states,
            live_state_bytes={},
            params=sum(p.numel() for p in self.model.parameters()),
            weights=weights_digest(self.model),
            seconds=self.seconds,
            ms_per_step=1000 * self.training_seconds / self.step,
            stack=1,
            error={"type": "diverged", "message": f"{end.reason} at step {step}"} if end.broken else None,
            language={"positions": positions, "ranks": self.ranks.n} | speed,
        )

    def _last_errors(self) -> dict[str, float]:
        """Of the gradient as the model is now, where the first was checked."""
        if not self.first_errors:
            return {}
        try:
            found = first_step.errors(self.model, self.spec, self.stream, refuse=False)
        except (RuntimeError, MemoryError) as problem:
            if not out_of_memory(problem):
                raise
            return {}  # which is not worth a training
        return {LAST[name]: value for name, value in found.items()}

    def speed(self) -> dict[str, float | int | None]:
        """Of training alone, since this process began, its first steps left out; None where there were no others."""
        tokens = self.clock.tokens_per_second()
        device = torch.cuda.get_device_name() if self.device != "cpu" else "cpu"
        peak = work.peak(device)
        return {
            "tokens_per_second": tokens,
            "flops_per_token": self.flops,
            "mfu": None if peak is None or tokens is None else tokens * self.flops / (peak * self.ranks.n),
            "peak_bytes": torch.cuda.max_memory_allocated() if self.device != "cpu" else None,
        }

    def says(self) -> str:
        """For people, in one line."""
        found = self.speed()
        said = []
        if found["tokens_per_second"] is not None:
            said.append(f"{rounded(found['tokens_per_second'])} tokens/s")
        if found["mfu"] is not None:
            said.append(f"MFU {100 * found['mfu']:.1f} %")
        if self.curve["step"]:
            said.append(f"valid loss {self.curve['valid/loss'][-1]:.3f}")
        if "valid/answer_accuracy" in self.curve:
            said.append(f"{100 * self.curve['valid/answer_accuracy'][-1]:.0f} % of answers right")
        return ", ".join(said)

    def save(self, folder: Path) -> None:
        """Every rank must call it; the first one writes."""
        self._wait()
        self.loss_sum = self.ranks.mean(self.loss_sum)  # of which the mean over the ranks is what it was
        if not self.ranks.first:
            return
        names = ("step", "curve", "loss_steps", "first_errors", "seconds", "training_seconds")
        state = {name: getattr(self, name) for name in names} | {"members": [run_id(self.spec)]}
        tensors = {f"model.{name}": t for name, t in tensors_of(self.model).items()}
        for name, p in self.model.named_parameters():
            tensors |= {f"{moment}.{name}": self.optim.state[p][moment] for moment in MOMENTS}
        checkpoint.save(folder, state, tensors | {"loss_sum": self.loss_sum, "broke_at": self.broke_at})

    def resume(self, folder: Path) -> None:
        """Go on from what `save` wrote, if it was this run's."""
        found = checkpoint.load(folder)
        if found is None or found[0].pop("members") != [run_id(self.spec)]:
            return
        state, tensors = found
        for name, value in state.items():
            if name != "tensors":
                setattr(self, name, value)
        with torch.no_grad():
            for name, t in tensors_of(self.model).items():
                t.copy_(tensors[f"model.{name}"])
            for name, p in self.model.named_parameters():
                self.optim.state[p]["step"].fill_(self.step)
                for moment in MOMENTS:
                    self.optim.state[p][moment].copy_(tensors[f"{moment}.{name}"])
        self.loss_sum, self.broke_at = tensors["loss_sum"].to(self.device), tensors["broke_at"].to(self.device)

    def _build(self) -> Model:
        vocab_size = max(cell.task.vocab_size for cell in self.stream.cells)
        max_len = max([self.seq_len, *(cell.rows.tokens.shape[1] for cell in self.valid)])
        dtype = torch.float64 if self.train.precision == "fp64" else torch.float32
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(draws.derive(self.spec.seed, "init"))
            model = build(self.spec.model, self.spec.mixer, vocab_size, max_len).to(self.device, dtype)
        model.changes = changes(self.spec.task)
        rows = min(self.train.batch_size, max(1, MICRO_TOKENS // self.seq_len))  # however they are dealt out
        first = self.stream.rows(0, (self.spec.seed,), "cpu", slice(0, rows))
        model.calibrate(first.tokens.to(self.device))
        return model

    def _optimiser(self) -> torch.optim.AdamW:
        kept: list[Tensor] = []
        decayed: list[Tensor] = []
        for p in self.model.parameters():
            matrix = p.ndim >= 2 and not getattr(p, "no_weight_decay", False)
            (decayed if matrix or self.train.decay == "all" else kept).append(p)
        groups = [{"params": decayed, "weight_decay": self.train.weight_decay}, {"params": kept, "weight_decay": 0.0}]
        on_gpu = self.device != "cpu"
        optim = torch.optim.AdamW(groups, lr=self.train.lr, betas=self.train.betas, fused=on_gpu)
        for p in self.model.parameters():  # now, so that a checkpoint has something to fill
            count = torch.zeros((), device=p.device if on_gpu else "cpu")
            optim.state[p] = {"step": count} | {moment: torch.zeros_like(p) for moment in MOMENTS}
        return optim

    def _flops_per_token(self) -> float:
        """The mean over the run's tokens: rows of different cells may be of different lengths."""
        lengths = [self.stream.task_at(step).seq_len for step in range(self.stream.steps)]
        each = {T: work.per_token(self.model, self.spec.model, self.spec.mixer, T) for T in set(lengths)}
        return sum(T * each[T] for T in lengths) / sum(lengths)

    def _state_bytes(self) -> dict[str, int]:
        """Of all layers, by the length of the evaluation rows, on the live state of a layer of each kind."""
        mixers = self.model.mixers()
        kinds = mixers[: 2 if self.spec.model.hybrid is not None else 1]
        try:
            each = {T: [state_bytes(inner, T) for inner in kinds] for T in {q.rows.tokens.shape[1] for q in self.valid}}
        except NotImplementedError:  # a plug-in without a recurrent form has no state to measure
            return {}
        return {str(T): sum(sizes[i % len(sizes)] for i in range(len(mixers))) for T, sizes in sorted(each.items())}

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.stream.steps


class Clock:
    """Tokens a second in this process since the look behind which no length was new: the first steps of each compile
    and allocate."""

    def __init__(self) -> None:
        self.first: tuple[int, float] | None = None
        self.last = (0, 0.0)
        self.met: Counter[int] = Counter()  # steps of each length
        self.warming = False  # whether one since the last look was among its length's first

    def step(self, length: int, warm: int) -> None:
        """One step, of which the first `warm` of a length compile or allocate."""
        self.met[length] += 1
        self.warming |= self.met[length] <= warm

    def look(self, tokens: int, seconds: float) -> None:
        self.last = tokens, seconds
        if self.warming or self.first is None:
            self.first = self.last
        self.warming = False

    def tokens_per_second(self) -> float | None:
        if self.first is None or self.last[0] == self.first[0]:
            return None
        return (self.last[0] - self.first[0]) / (self.last[1] - self.first[1])


MOMENTS = ("exp_avg", "exp_avg_sq")


@torch.no_grad()
def state_bytes(inner: Mixer, T: int) -> int:
    """On the state behind T tokens, or behind one where the mixer's law says that this is as large, and two agree."""
    like = next(inner.parameters(), torch.empty(()))

    def behind(n: int) -> int:
        return nbytes(inner.prefill(like.new_zeros(1, n, inner.d_model), inner.init_state(1))[1])

    if inner.state_law == "constant" and (one := behind(1)) == behind(2):
        return one
    return behind(T)


def tensors_of(model: Model) -> dict[str, Tensor]:
    """Parameters and buffers by their names."""
    return {name: t.detach() for name, t in [*model.named_parameters(), *model.named_buffers()]}


def weights_digest(model: Model) -> str:
    found = hashlib.sha256()
    for p in model.parameters():
        found.update(p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return f"sha256:{found.hexdigest()}"


def reached(stop: Stop, valid: dict[str, float]) -> bool:
    value = valid[stop.metric]
    return (stop.above is not None and value > stop.above) or (stop.below is not None and value < stop.below)


def run_id(spec: RunSpec) -> str:
    return digest(spec.model_dump(mode="json"))


def rounded(n: float) -> str:
    """1.23M, 45.6K."""
    for unit, size in (("M", 1e6), ("K", 1e3)):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return f"{n:.3g}"
