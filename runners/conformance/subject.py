"""The mixer under test: how the checks build it, feed it and step it.

On the CPU forms are compared in float64. On a GPU they are compared in float32, the widest dtype that its kernels
serve; two forms may then differ by what a tensor core rounds.
"""

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from mixassay import plugins
from mixassay.errors import UserError
from mixassay.fields import explained
from mixassay.mixers import Mixer, State, mixer
from mixassay.registry import arguments, bind, suggest
from mixassay.source import Node, Place

CPU = torch.device("cpu")
GIVEN = ("d_model",)
NUDGE = 0.01


@dataclass(frozen=True)
class Subject:
    """`args` are the mixer's keyword arguments. `full`: longer sequences, more of them, and the real compiler."""

    name: str
    cls: type[Mixer]
    args: Mapping[str, Any] = field(default_factory=dict)
    d_model: int = 16
    device: torch.device = CPU
    full: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.device.type == "cpu" else torch.float32

    @property
    def tolerance(self) -> float:
        """Between two forms, relative to the largest entry."""
        return 1e-9 if self.device.type == "cpu" else 1e-2

    @property
    def rounding(self) -> float:
        """Between two runs of one form: what a fast Fourier transform may carry from anywhere to anywhere."""
        return 1e-11 if self.device.type == "cpu" else 1e-5

    def build(self, seed: int = 0, dtype: torch.dtype | None = None, *, nudge: float = NUDGE) -> Mixer:
        """A new mixer. Its parameters are moved a little: right at the start, weights of zero may hide all others."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = self.cls(self.d_model, **self.args)
            made.d_model = self.d_model  # as `model.build` does
            with torch.no_grad():
                for p in made.parameters():
                    p.add_(nudge * torch.randn_like(p))
        return made.to(self.device, self.dtype if dtype is None else dtype)

    def tokens(self, B: int, T: int, seed: int = 1, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal [B, T, D]; a longer draw begins as a shorter one of the same B does not."""
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(B, T, self.d_model, generator=draw, dtype=torch.float64)
        return x.to(self.device, self.dtype if dtype is None else dtype)

    @property
    def steps(self) -> bool:
        """Whether there is a recurrent form."""
        return self.cls.step is not Mixer.step and self.cls.init_state is not Mixer.init_state


def device(name: str) -> torch.device:
    """The device of that name, if it is here."""
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise UserError(f"--device should be cpu, cuda or cuda:N, got {name}")
    found = torch.device(name)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name} is asked for, but torch sees none here")
    return found


def device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def forward(m: Mixer, x: Tensor) -> Tensor:
    """y [B, T, D]. A mixer that wants to be told where segments begin is told: every five tokens."""
    y: Tensor = m(x, *([changes(x)] if m.told_changes else []))
    return y


def changes(x: Tensor) -> Tensor:
    return (torch.arange(x.shape[1], device=x.device) % 5 == 0).expand(x.shape[:2])


def run_steps(m: Mixer, x: Tensor, state: State = None) -> tuple[Tensor, State]:
    """Token by token: y [B, T, D] and the last state."""
    state, ys = m.init_state(len(x)) if state is None else state, []
    for t in range(x.shape[1]):
        y, state = m.step(x[:, t], state, *([changes(x)[:, t]] if m.told_changes else []))
        ys.append(y)
    return torch.stack(ys, dim=1), state


def gap(found: Tensor, wanted: Tensor, least: float = 0.0) -> float:
    """The largest difference, relative to the largest wanted entry or to `least` if that is more; inf where either is
    not finite."""
    if not bool(found.isfinite().all() & wanted.isfinite().all()):
        return float("inf")
    difference, size = (largest(x) for x in (found - wanted, wanted))
    return difference / max(size, least) if max(size, least) else difference


def largest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


def find(name: str, args: Mapping[str, Any] | None = None, **how: Any) -> Subject:
    """The subject of `name`: a registered mixer, `path.py:Class`, or `package.module:Class`.

    Of a file or module with one mixer the class need not be named. `how`: the subject's other fields. Raises
    `UserError` where there is no such mixer, or it cannot be made with these arguments and this width.
    """
    cls, args = resolve(name), args or {}
    try:
        subject = Subject(name, cls, bind(cls, args, GIVEN), **how)
        subject.build()
    except ValidationError as fault:
        at = Place(name)
        given = Node({key: Node(value, at) for key, value in args.items()}, at)
        messages = (message for _, message in explained(fault, arguments(cls, GIVEN), given, ""))
        raise UserError(f"{name}: {'; '.join(messages)}") from fault
    except UserError as fault:
        raise UserError(f"{name}: {fault}") from fault
    except Exception as fault:
        raise UserError(f"{name} cannot be made: {plugins.told(fault)}") from fault
    return subject


def resolve(name: str) -> type[Mixer]:
    module, _, wanted = name.partition(":")
    if module.endswith(".py"):
        found = plugins.load_file(Path(module))
    elif wanted or "." in module:
        plugins.load([module])
        found = sys.modules[module]
    else:
        try:
            return mixer[name]
        except ImportError as fault:
            raise UserError(f"mixer {name}: {plugins.told(fault)}") from fault
    known = {n: c for n, c in vars(found).items() if is_mixer(c)}
    own = [n for n, c in known.items() if c.__module__ == found.__name__]
    if not wanted and len(own) == 1:
        wanted = own[0]
    if wanted in known:
        cls: type[Mixer] = known[wanted]
        return cls
    if not own:
        raise UserError(f"{module} has no subclass of mixassay.mixers.Mixer")
    raise UserError(f"{name}: name one of the mixers of {module}.{suggest(wanted, own)}")


def is_mixer(thing: object) -> bool:
    return inspect.isclass(thing) and issubclass(thing, Mixer) and thing is not Mixer
