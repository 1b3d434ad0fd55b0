"""M models of one shape, trained as one: parameters in a flat [M, P] buffer, a loss and a gradient per model.

A mixer is written as if there were one model. Here its module runs M times: side by side through `torch.func.vmap`
over a leading model dimension (`vmap`), or one after another on views of the buffer (`loop`), whichever suits the
device. No model reads another's rows, so its numbers are those that it would have alone, up to rounding.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from mixassay.errors import UserError
from mixassay.kernels.common.precision import cast, rounding
from mixassay.mixers import Mixer
from mixassay.model import Model, labelled_loss, scores
from mixassay.runners.optim import one_pass
from mixassay.tasks import IGNORE

Mode = Literal["vmap", "loop"]


class Stack:
    """Holds M equal-shaped models on one device. `params` [M, P] is the storage of all their parameters."""

    def __init__(self, models: Sequence[Model], *, mode: Mode, precision: str = "fp32") -> None:
        first = models[0]
        self.mode, self.precision = mode, precision
        self.names = [name for name, _ in first.named_parameters()]
        self.shapes = [p.shape for p in first.parameters()]
        self.sizes = [p.numel() for p in first.parameters()]
        self.params = torch.stack([torch.cat([p.detach().flatten() for p in m.parameters()]) for m in models])
        self.buffers = {
            name: torch.stack([m.get_buffer(name).detach() for m in models]) for name, _ in first.named_buffers()
        }
        self.models = list(models) if mode == "loop" else [first]
        self.softens = any(inner.softens for inner in first.mixers())
        self._places: tuple[Tensor, Tensor] | None = None
        self.observes = any(type(inner).observe is not Mixer.observe for inner in first.mixers())
        self._bind()

    def __len__(self) -> int:
        return self.params.shape[0]

    def decay_mask(self, which: str) -> Tensor:
        """[P]: 1 where weight decay applies. `matrices` spares vectors and parameters marked `no_weight_decay`."""
        marks = []
        for p, size in zip(self.models[0].parameters(), self.sizes, strict=True):
            decayed = which == "all" or (p.ndim >= 2 and not getattr(p, "no_weight_decay", False))
            marks.append(self.params.new_full((size,), float(decayed)))
        return torch.cat(marks)

    def keep(self, rows: list[int]) -> None:
        """Drop all models but these."""
        self.params = self.params[rows].clone()
        self.buffers = {name: b[rows] for name, b in self.buffers.items()}
        if self.mode == "loop":
            self.models = [self.models[i] for i in rows]
        self._bind()

    def weights(self, row: int) -> dict[str, Tensor]:
        """One model's parameters and buffers, by their names in the model."""
        named = self._named([view[row] for view in self._views()])
        return named | {name: b[row] for name, b in self.held().items()}

    def held(self) -> dict[str, Tensor]:
        """The buffers of all models [M, ...], as training has left them."""
        if self.mode == "vmap" or not self.models:
            return self.buffers
        return {name: torch.stack([m.get_buffer(name).detach() for m in self.models]) for name in self.buffers}

    @torch.no_grad()
    def hold(self, buffers: dict[str, Tensor]) -> None:
        """What `held` gave."""
        for name, rows in buffers.items():
            if self.mode == "vmap":
                self.buffers[name].copy_(rows)
            else:
                for model, row in zip(self.models, rows, strict=True):
                    model.get_buffer(name).copy_(row)

    def model(self, row: int) -> Model:
        """One model as a module with its weights, until the next call: side by side there is one module for all."""
        if self.mode == "loop":
            return self.models[row]
        (model,) = self.models  # whose own parameters nothing else reads
        with torch.no_grad():
            for name, x in self.weights(row).items():
                (model.get_parameter(name) if name in self.names else model.get_buffer(name)).copy_(x)
        return model

    def weights_digest(self, row: int) -> str:
        data = self.params[row].cpu().contiguous().view(torch.uint8).numpy()
        return "sha256:" + hashlib.sha256(data.tobytes()).hexdigest()

    def loss_and_grad(
        self, tokens: Tensor, positions: Tensor, labels: Tensor, keep: Tensor | None, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """tokens [M, B, T], positions and labels [M, B, Q], keep [M, B, T, D] or None -> losses [M], grads [M, P].

        `scale` [M], for fp16: `LossScale.value`. A gradient that overflows comes back as one that is not finite.
        """
        factor = None
        if self.precision == "fp16":  # loss_scale.py says why
            factor = (labels != IGNORE).sum((-1, -2)).clamp(min=1) / 4
            factor = factor if scale is None else factor * scale
        with rounding(self.precision):
            if self.mode == "vmap":
                return self._side_by_side(tokens, positions, labels, keep, factor)
            return self._one_by_one(tokens, positions, labels, keep, factor)

    def _one_by_one(
        self, tokens: Tensor, positions: Tensor, labels: Tensor, keep: Tensor | None, factor: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        losses, grads = [], []
        for i, model in enumerate(self.models):
            with self._cast():
                head = labelled_loss(labels[i], IGNORE)
                loss = model(tokens[i], positions[i], None if keep is None else keep[i], head)
            losses.append(loss.detach())
            grads.append(gradients(loss, list(model.parameters()), None if factor is None else factor[i]))
        return torch.stack(losses), torch.stack(grads)

    @torch.no_grad()
    def scores(
        self, tokens: Tensor, positions: Tensor, labels: Tensor, rows: list[int] | None = None, *, soft: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The same questions to every model (or those in `rows`): tokens [B, T], positions and labels [B, Q] -> loss
        and whether the answer is right [M, B, Q]. `soft`: of the models as they train."""
        every = rows is None or rows == list(range(len(self)))
        rows = list(range(len(self))) if rows is None else rows
        asked = (tokens, positions, None, scores(labels, IGNORE))
        with rounding(self.precision), self._cast(), contextlib.nullcontext() if soft else self._hard():
            if self.mode == "loop":
                found = [self.models[i](*asked) for i in rows]
                return torch.stack([loss for loss, _ in found]), torch.stack([right for _, right in found])
            forward = vmap(lambda p, b: functional_call(self.models[0], (p, b), asked))
            chosen = slice(None) if every else torch.tensor(rows, device=self.params.device)
            params = self._named([view[chosen] for view in self._views()])
            loss, right = forward(params, {name: b[chosen] for name, b in self.buffers.items()})
            return loss, right

    @torch.no_grad()
    def observe(self, tokens: Tensor, rows: list[int]) -> list[dict[str, float]]:
        """What the mixers of each model say of these rows [B, T] (`Mixer.observe`), means over its layers."""
        return [self._observe(tokens, i) if self.observes else {} for i in rows]

    def _observe(self, tokens: Tensor, row: int) -> dict[str, float]:
        said: dict[str, list[float]] = {}

        def look(inner: Mixer, given: tuple[Tensor, ...]) -> None:
            for name, value in inner.observe(*given).items():
                said.setdefault(name, []).append(number(inner, name, value))

        model = self.models[row] if self.mode == "loop" else self.models[0]
        params = self._named([view[row] for view in self._views()])
        with rounding(self.precision), self._cast(), self._hard(), model.watched(look):
            buffers = {name: b[row] for name, b in self.buffers.items()} if self.mode == "vmap" else {}
            functional_call(model, (params, buffers), (tokens, torch.zeros_like(tokens[:, :1])))
        return {name: sum(values) / len(values) for name, values in said.items()}

    def _side_by_side(
        self, tokens: Tensor, positions: Tensor, labels: Tensor, keep: Tensor | None, factor: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        def loss(
            p: dict[str, Tensor], b: dict[str, Tensor], t: Tensor, q: Tensor, y: Tensor, k: Tensor | None
        ) -> Tensor:
            found: Tensor = functional_call(self.models[0], (p, b), (t, q, k, labelled_loss(y, IGNORE)))
            return found

        leaves = [leaf.requires_grad_() for leaf in self.leaves()]
        in_dims = (0, 0, 0, 0, 0, None if keep is None else 0)
        with self._cast():
            losses = vmap(loss, in_dims)(self._named(leaves), self.buffers, tokens, positions, labels, keep)
        return losses.detach(), gradients(losses, leaves, factor)

    def _views(self) -> list[Tensor]:
        """Every parameter of all models, [M, *shape], detached."""
        return self._shaped(torch.split(self.params.detach(), self.sizes, dim=1))

    def leaves(self) -> list[Tensor]:
        """As `_views`; where kernels serve, copies that are contiguous, which each of them would make for itself."""
        if not one_pass(self.params):
            return self._views()
        from mixassay.kernels.unpack import triton  # the package triton may not be there

        if self._places is None:
            self._places = triton.places(self.sizes, self.params.device)
        blocks = triton.unpack(self.params.detach(), *self._places)
        return self._shaped(torch.split(blocks, [len(self) * size for size in self.sizes]))

    def _shaped(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [part.view(len(self), *shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def _named(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.names, tensors, strict=True))

    def _bind(self) -> None:
        """In a loop every model's parameters are views of its row, so that one update of the buffer moves them all."""
        if self.mode == "loop":
            for model, row in zip(self.models, self.params, strict=True):
                for p, part in zip(model.parameters(), torch.split(row, self.sizes), strict=True):
                    p.data = part.view(p.shape)

    @contextlib.contextmanager
    def _hard(self) -> Iterator[None]:
        """Models as they are evaluated: in `eval` mode."""
        for model in self.models:
            model.eval()
        try:
            yield
        finally:
            for model in self.models:
                model.train()

    def _cast(self) -> contextlib.AbstractContextManager[object]:
        return cast(self.params.device.type, self.precision)


def number(inner: Mixer, name: str, value: Tensor) -> float:
    """What a mixer says of itself. Raises `UserError` for what is no number."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise UserError(f'{type(inner).__name__}.observe gives {found} for "{name}"; a tensor of one number is wanted')
    return value.item()


def gradients(losses: Tensor, leaves: list[Tensor], factor: Tensor | None) -> Tensor:
    """[..., P]: of losses [...], with respect to leaves [..., *shape] side by side in their order; 0 where unused.
    `factor` [...] is what the losses are multiplied by on the way."""
    total = losses.sum() if factor is None else (losses * factor).sum()
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    full = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, leaves, strict=True)]
    flat = torch.cat([g.reshape(*losses.shape, -1) for g in full], dim=-1)
    return flat if factor is None else flat / factor.unsqueeze(-1)
