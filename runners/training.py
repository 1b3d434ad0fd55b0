"""A stack between two steps: what its members have learnt so far, and how they end.

Each member has its own initialisation, rows, learning rate, clipping, early stop and quarantine: one whose loss or
gradient is not finite (in float16, at no scale) is frozen and recorded as diverged, and one that has finished is taken
out, while the others go on. Randomness comes from counters alone, so a stack continues from a checkpoint bit for bit.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mixassay import draws
from mixassay.errors import UserError
from mixassay.model import build
from mixassay.runners import checkpoint
from mixassay.runners.ahead import Ahead
from mixassay.runners.evaluate import Questions, evaluate, means, observe, questions
from mixassay.runners.graph import Replay
from mixassay.runners.loss_scale import LossScale
from mixassay.runners.optim import AdamW, paces
from mixassay.runners.outcome import Keep, Outcome
from mixassay.runners.schedule import schedule
from mixassay.runners.stack import Mode, Stack
from mixassay.runners.stream import Stream, changes, decodes, seeds_on
from mixassay.spec import RunSpec, Stop, digest, problems
from mixassay.tasks import Rows

LOOK_EVERY = 50
"""Steps between looks at which members have diverged: each look waits for the device."""

DROPOUT = draws.stream("dropout")


@dataclass(frozen=True)
class End:
    """Why and after which step a member ends."""

    step: int
    reason: str
    broken: bool = False


@dataclass
class Member:
    """A member still in training; `place` is its index among all specs of the stack."""

    place: int
    spec: RunSpec
    curve: dict[str, list[float]] = field(
        default_factory=lambda: {"step": [], "train/loss": [], "valid/accuracy": [], "valid/loss": []}
    )
    seconds: float = 0.0
    training_seconds: float = 0.0


class Training:
    """The state of a stack between two steps. `keep` is given each member's weights when it has finished."""

    def __init__(self, specs: Sequence[RunSpec], device: str, keep: Keep | None = None) -> None:
        self.specs, self.device, self.keep = list(specs), device, keep
        self.spec, self.train = specs[0], specs[0].train
        assert all(spec.stack == self.spec.stack for spec in specs), "members of a stack must be alike"
        for _, message in problems(self.spec):
            raise UserError(message)
        self.stream = Stream(self.spec.task, self.train)
        self.valid = questions(self.spec.task, "valid", device)
        self.test: list[Questions] | None = None
        self.members = [Member(place, spec) for place, spec in enumerate(specs)]
        self.finished: list[Outcome] = []
        self.step = 0
        self.stack = self._build()
        M, p = len(specs), self.stack.params
        self.active = torch.ones(M, dtype=torch.bool, device=device)
        self.broke_at = torch.full((M,), -1, device=device)  # the step at which a member diverged
        self.loss_sum = p.new_zeros(M, dtype=torch.float64)  # over the loss_steps since the last validation
        self.loss_steps = 0
        self.optim = AdamW(
            lr=p.new_tensor([spec.train.lr for spec in specs]),
            weight_decay=p.new_tensor([spec.train.weight_decay for spec in specs]),
            decay_mask=self.stack.decay_mask(self.train.decay),
            betas=self.train.betas,
            clip=self.train.clip,
            mean=torch.zeros_like(p),
            square=torch.zeros_like(p),
        )
        self.loss_scale = LossScale.start(M, device)
        steps, train = self.stream.steps, self.train
        shares = [schedule(train.schedule, step, steps, train.warmup) for step in range(steps)]
        self.paces = paces(shares, train.betas).to(p)
        self.count = torch.zeros((), dtype=torch.int64, device=device)  # updates made
        self.replay = Replay(self._update, device)
        self.drawings: dict[int, Replay] = {}
        self.ahead = Ahead(self._draw, self.stream.steps, device)
        self.eval_every = self.train.eval_every or max(1, self.stream.steps // (self.train.epochs or 10))
        self.state_bytes: tuple[dict[str, int], dict[str, int]] | None = None
        self.first_errors: dict[str, float] = {}  # of the first gradient, where it was checked (`first_step`)

    def advance(self) -> None:
        """One step of every member."""
        start = time.perf_counter()
        self.replay(*by_member(self.ahead.rows(self.step), len(self.members)), taken=self.ahead.taken)
        self.loss_steps += 1
        self.step += 1
        if self.device != "cpu" and self._due(LOOK_EVERY):
            torch.cuda.synchronize()
        self._charge(time.perf_counter() - start, training=True)

    def first_rows(self) -> tuple[Tensor, ...]:
        """Of the first step, `by_member`."""
        seeds = tuple(spec.seed for spec in self.specs)
        return by_member(self.stream.rows(0, seeds, self.device), len(seeds))

    def _draw(self, step: int) -> Rows:
        seeds = tuple(member.spec.seed for member in self.members)
        rows: Rows = self._drawing(self.stream.cell_at(step))(*self.stream.numbers(step, seeds, self.device))
        return rows

    def _drawing(self, cell: int) -> Replay:
        """Numbers and seeds of rows -> the rows, of one cell of the mixture."""
        if cell not in self.drawings:
            task = self.stream.cells[cell].task
            self.drawings[cell] = Replay(lambda index, seed: task.rows(index, seed=seed, split="train"), self.device)
        return self.drawings[cell]

    def _update(self, tokens: Tensor, positions: Tensor, labels: Tensor) -> None:
        """Changes, in place: parameters, the optimiser, `count`, `active`, `broke_at`, `loss_sum`, `loss_scale`."""
        keep = None
        if self.spec.model.dropout > 0:
            seeds = seeds_on(self.device, tuple(member.spec.seed for member in self.members))
            shape = (*tokens.shape[1:], self.spec.model.d_model)
            keep = draws.keep_mask(seeds, DROPOUT, self.count, shape, self.spec.model.dropout)
        loss, grad = self.stack.loss_and_grad(tokens, positions, labels, keep, self.loss_scale.value)
        pace = self.paces.index_select(0, self.count.view(1)).squeeze(0)
        fine = self.active & (loss.abs() < math.inf)
        moved = self.optim.update(self.stack.params, grad, pace, fine)
        if self.train.precision == "fp16":
            moved |= self.loss_scale.adjust(fine & ~moved)
        fine &= moved
        self.broke_at.copy_(torch.where(self.active ^ fine, self.count, self.broke_at))
        self.active.copy_(fine)
        self.loss_sum += torch.where(fine, loss, 0.0)
        self.count += 1

    def settle(self) -> list[Outcome]:
        """After a step: validates where that is due, and takes out the members that have finished."""
        start = time.perf_counter()
        validate = self._due(self.eval_every)
        if not validate and not self._due(LOOK_EVERY):
            return []
        ends: dict[int, End] = {
            i: End(self.broke_at.tolist()[i], "loss or gradient not finite", broken=True)
            for i, ok in enumerate(self.active.tolist())
            if not ok
        }
        valid: dict[int, list[dict[str, Any]]] = {}
        if validate:
            alive = [i for i in range(len(self.members)) if i not in ends]
            valid = dict(zip(alive, evaluate(self.stack, self.valid, "valid", alive), strict=True))
            ends |= {i: end for i in alive if (end := self._judge(i, means(valid[i], "valid")))}
            self.loss_sum.zero_()
            self.loss_steps = 0
        self._charge(time.perf_counter() - start, training=False)
        return self._finish(ends, valid) if ends else []

    def _judge(self, i: int, valid: dict[str, float]) -> End | None:
        """Notes a validation in the member's curve; says why it ends here, if it does."""
        curve = self.members[i].curve
        curve["step"].append(self.step)
        curve["train/loss"].append(self.loss_sum[i].item() / self.loss_steps)
        for name, value in valid.items():
            curve[name].append(value)
        if not math.isfinite(valid["valid/loss"]):
            return End(self.step, "validation loss not finite", broken=True)
        if self.train.stop is not None and reached(self.train.stop, valid):
            return End(self.step, describe(self.train.stop))
        return End(self.step, "steps") if self.step == self.stream.steps else None

    def _finish(self, ends: dict[int, End], valid: dict[int, list[dict[str, Any]]]) -> list[Outcome]:
        """Tests the members that end well, takes all that end out of the stack, and returns their outcomes."""
        start = time.perf_counter()
        well = [i for i, end in ends.items() if not end.broken]
        if self.test is None and well:
            self.test = questions(self.spec.task, "test", self.device)
        test = dict(zip(well, evaluate(self.stack, self.test or [], "test", well), strict=True))
        seen = dict(zip(well, observe(self.stack, self.valid, "valid", well), strict=True))
        left_out = self.loss_scale.skipped.tolist()
        noted_of = {
            i: self.first_errors | ({"train/skipped_steps": float(left_out[i])} if left_out[i] else {}) for i in well
        }
        if self.state_bytes is None:
            self.state_bytes = self._state_bytes()
        self._charge(time.perf_counter() - start, training=False)
        done = [
            Outcome(
                spec=self.members[i].spec,
                status="diverged" if end.broken else "ok",
                metrics={} if end.broken else means(valid[i], "valid") | means(test[i], "test") | seen[i] | noted_of[i],
                eval=[] if end.broken else valid[i] + test[i],
                curve=self.members[i].curve,
                stopped={"step": end.step, "reason": end.reason},
                state_bytes=self.state_bytes[0],
                live_state_bytes=self.state_bytes[1],
                params=self.stack.params.shape[1],
                weights=self.stack.weights_digest(i),
                seconds=self.members[i].seconds,
                ms_per_step=1000 * self.members[i].training_seconds / self.step,
                stack=len(self.specs),
                error=self._diverged(end) if end.broken else None,
            )
            for i, end in sorted(ends.items())
        ]
        if self.keep is not None:
            for i in ends:
                self.keep(self.members[i].spec, self.stack.weights(i))
        self.finished += done
        stay = [i for i in range(len(self.members)) if i not in ends]
        self.members = [self.members[i] for i in stay]
        self.active, self.broke_at, self.loss_sum = self.active[stay], self.broke_at[stay], self.loss_sum[stay]
        self._keep(stay)
        return done

    def _diverged(self, end: End) -> dict[str, str]:
        message = f"{end.reason} at step {end.step}"
        if self.train.precision == "fp16":
            message += "; float16 ends at 65,504, train.precision tf32 has as many digits and float32's range"
        return {"type": "diverged", "message": message}

    def progress(self) -> dict[str, Any]:
        training = sum(member.training_seconds for member in self.members)
        return {
            "event": "progress",
            "step": self.step,
            "steps": self.stream.steps,
            "active": len(self.members),
            "ms_per_step": 1000 * training / self.step if self.members else 0.0,
        }

    def save(self, folder: Path) -> None:
        state = {
            "members": [member_id(spec) for spec in self.specs],
            "step": self.step,
            "alive": [{k: v for k, v in vars(m).items() if k != "spec"} for m in self.members],
            "loss_steps": self.loss_steps,
            "first_errors": self.first_errors,
            "finished": [asdict(o) | {"spec": self.specs.index(o.spec)} for o in self.finished],
        }
        tensors = {
            "params": self.stack.params,
            "mean": self.optim.mean,
            "square": self.optim.square,
            "loss_sum": self.loss_sum,
            "active": self.active,
            "broke_at": self.broke_at,
            "loss_scale": self.loss_scale.value,
            "calm": self.loss_scale.calm,
            "skipped": self.loss_scale.skipped,
        }
        buffers = {f"buffer.{name}": held for name, held in self.stack.held().items()}
        checkpoint.save(folder, state, tensors | buffers)

    def resume(self, folder: Path) -> None:
        found = checkpoint.load(folder)
        if found is None or found[0]["members"] != [member_id(spec) for spec in self.specs]:
            return
        state, tensors = found
        tensors = {name: t.to(self.device) for name, t in tensors.items()}
        self.members = [Member(spec=self.specs[m["place"]], **m) for m in state["alive"]]
        self._keep([member.place for member in self.members])
        self.finished = [Outcome(**o | {"spec": self.specs[o["spec"]]}) for o in state["finished"]]
        self.step = state["step"]
        self.count.fill_(self.step)
        self.loss_steps, self.first_errors = state["loss_steps"], state.get("first_errors", {})
        self.stack.params.copy_(tensors["params"])
        self.optim.mean, self.optim.square = tensors["mean"], tensors["square"]
        self.loss_sum, self.active, self.broke_at = tensors["loss_sum"], tensors["active"], tensors["broke_at"]
        buffers = {f"buffer.{name}": name for name in self.stack.buffers}
        self.stack.hold({name: tensors[key] for key, name in buffers.items() if key in tensors})
        if "loss_scale" in tensors:  # else the checkpoint is older
            self.loss_scale = LossScale(tensors["loss_scale"], tensors["calm"], tensors["skipped"])

    def _build(self) -> Stack:
        """Every member is built by the code and from the seed that it would have alone, then stacked."""
        vocab_size = max(cell.task.vocab_size for cell in self.stream.cells)
        max_len = max(t.seq_len for t in [c.task for c in self.stream.cells] + [q.task for q in self.valid])
        dtype = torch.float64 if self.train.precision == "fp64" else torch.float32
        models = []
        with torch.random.fork_rng(devices=[]):
            for spec in self.specs:
                torch.manual_seed(draws.derive(spec.seed, "init"))
                model = build(spec.model, spec.mixer, vocab_size, max_len, decodes(spec.task)).to(self.device, dtype)
                model.changes = changes(spec.task)
                if any(inner.calibrates for inner in model.mixers()):
                    model.calibrate(self.stream.rows(0, (spec.seed,), self.device).tokens)
                models.append(model)
        longest = max(cell.task.seq_len for cell in self.stream.cells)
        how = mode(self.device, len(models), self.train.batch_size * longest * self.spec.model.d_model)
        if not all(inner.stacks for inner in models[0].mixers()):
            how = "loop"
        return Stack(models, mode=how, precision=self.train.precision)

    def try_out(self) -> None:
        """Before the first step: what is asked of a mixer behind the last, lest it fail there."""
        self.state_bytes = self._state_bytes()
        for cell in self.valid[:1]:
            self.stack.observe(cell.rows.tokens[:1], [0])

    def _state_bytes(self) -> tuple[dict[str, int], dict[str, int]]:
        """Of the whole state, and of what holds something where that is less."""
        model, lengths = self.stack.models[0], sorted({q.task.seq_len for q in self.valid})
        try:
            whole = {T: model.state_bytes(T) for T in lengths}
            live = {T: model.live_state_bytes(T) for T in lengths}
        except NotImplementedError:  # a plug-in without a recurrent form has no state to measure
            return {}, {}
        return {str(T): n for T, n in whole.items()}, {str(T): n for T, n in live.items() if n < whole[T]}

    def _keep(self, rows: list[int]) -> None:
        self.stack.keep(rows)
        self.optim.keep(rows)
        self.loss_scale.keep(rows)
        self.ahead.forget()
        self.replay.forget()
        self.drawings.clear()

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.stream.steps

    def _charge(self, seconds: float, *, training: bool) -> None:
        share = seconds / len(self.members)
        for member in self.members:
            member.seconds += share
            member.training_seconds += share if training else 0.0


def by_member(rows: Rows, members: int) -> tuple[Tensor, ...]:
    """What each of them is asked: tokens [M, B, T], positions and labels [M, B, Q]."""
    return tuple(torch.unflatten(x, 0, (members, -1)) for x in (rows.tokens, rows.positions, rows.labels))


STACK_BELOW = 4096
"""Activations of a layer and model (B T D), up to which a CPU is faster side by side: docs/log.md has the table."""


def mode(device: str, members: int, activations: int) -> Mode:
    """How the members of a stack run, by the device and the size of one model's step, never by a stopwatch: a run
    that is repeated or resumed takes the same way. On a GPU launches dominate and side by side wins; on a CPU it
    wins only for the smallest models (1.5 to 1.9 times), and the loop elsewhere (1.2 to 3 times)."""
    small = members > 1 and activations <= STACK_BELOW
    return "vmap" if device != "cpu" or small else "loop"


def reached(stop: Stop, valid: dict[str, float]) -> bool:
    value = valid[stop.metric]
    return (stop.above is not None and value > stop.above) or (stop.below is not None and value < stop.below)


def describe(stop: Stop) -> str:
    bounds = [f"{sign} {bound}" for sign, bound in ((">", stop.above), ("<", stop.below)) if bound is not None]
    return f"{stop.metric} {' or '.join(bounds)}"


def member_id(spec: RunSpec) -> str:
    return digest(spec.model_dump(mode="json"))
