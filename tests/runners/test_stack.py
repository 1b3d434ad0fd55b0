"""A stack's losses and gradients are those of its members, one by one, in both modes."""

from typing import Any

import pytest
import torch
from torch import nn

from mixassay.kernels.common.precision import rounding
from mixassay.mixers import Mixer
from mixassay.model import Model, labelled_loss
from mixassay.runners.stack import Stack
from mixassay.spec import ModelSpec
from mixassay.tasks import IGNORE


class Average(Mixer):
    """A causal running mean with a scalar, a vector, a matrix, an unused parameter and a constant buffer."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.proj = nn.Linear(d_model, d_model)
        self.gain: Any = nn.Parameter(torch.randn(()))
        self.unused = nn.Parameter(torch.randn(3))
        self.gain.no_weight_decay = True
        self.register_buffer("offset", torch.tensor(0.5))

    def forward(self, x):
        count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)
        return self.proj(x).cumsum(1) / count[:, None] * self.gain + self.offset


def models(block: Any = "zoology", M: int = 3) -> list[Model]:
    torch.manual_seed(1)
    spec = ModelSpec(d_model=8, block=block, positions="learned")
    return [Model(spec, 13, 6, lambda layer: Average(8)).double() for _ in range(M)]


def batch(M=3, B=4, T=6, Q=2):
    g = torch.Generator().manual_seed(2)
    labels = torch.randint(13, (M, B, Q), generator=g)
    labels[:, 0, 1] = IGNORE
    keep = torch.rand(M, B, T, 8, generator=g) < 0.8
    return torch.randint(13, (M, B, T), generator=g), torch.randint(T, (M, B, Q), generator=g), labels, keep


@pytest.mark.parametrize("block", ["zoology", "mamba", "swiglu"])
@pytest.mark.parametrize("mode", ["loop", "vmap"])
@pytest.mark.parametrize("dropout", [False, True])
def test_losses_and_gradients_are_the_members_own(mode, block, dropout):
    members = models(block)
    tokens, positions, labels, keep = batch()
    expected = []
    for i, model in enumerate(members):
        loss = model(tokens[i], positions[i], keep[i] if dropout else None, labelled_loss(labels[i], IGNORE))
        grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        flat = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, model.parameters(), strict=True)]
        expected.append((loss.detach(), torch.cat([g.flatten() for g in flat])))
    stack = Stack(members, mode=mode)
    loss, grad = stack.loss_and_grad(tokens, positions, labels, keep if dropout else None)
    torch.testing.assert_close(loss, torch.stack([e[0] for e in expected]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, torch.stack([e[1] for e in expected]), rtol=1e-10, atol=1e-12)


def test_labelled_positions_give_the_loss_of_all_positions():
    model = models()[0]
    tokens, positions, labels, _ = (x[0] for x in batch())
    positions = positions.sort(-1).values
    positions[:, 1] = positions[:, 0] + 1  # distinct, so that the dense form can hold both
    positions %= 6
    dense = torch.full_like(tokens, IGNORE).scatter(1, positions, labels)
    everywhere = model(tokens, head=labelled_loss(dense, IGNORE))
    torch.testing.assert_close(model(tokens, positions, head=labelled_loss(labels, IGNORE)), everywhere)


@pytest.mark.parametrize("mode", ["loop", "vmap"])
def test_dropping_members_leaves_the_others(mode):
    members = models()
    tokens, positions, labels, _ = batch()
    stack = Stack(members, mode=mode)
    loss, grad = stack.loss_and_grad(tokens, positions, labels, None)
    digests = [stack.weights_digest(i) for i in range(3)]
    stack.keep([0, 2])
    fewer = stack.loss_and_grad(tokens[[0, 2]], positions[[0, 2]], labels[[0, 2]], None)
    torch.testing.assert_close(fewer[0], loss[[0, 2]], rtol=1e-12, atol=0)
    torch.testing.assert_close(fewer[1], grad[[0, 2]], rtol=1e-12, atol=1e-15)
    assert [stack.weights_digest(i) for i in range(2)] == [digests[0], digests[2]]
    assert len(set(digests)) == 3


@pytest.mark.parametrize("mode", ["loop", "vmap"])
def test_an_update_of_the_buffer_moves_the_models(mode):
    stack = Stack(models(), mode=mode)
    tokens, positions, labels, _ = (x[0] for x in batch())
    before, _ = stack.scores(tokens, positions, labels)
    stack.params[1] += 0.1
    after, _ = stack.scores(tokens, positions, labels)
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not torch.allclose(before[1], after[1])
    assert torch.equal(stack.scores(tokens, positions, labels, [1])[0], after[1:2])


@pytest.mark.parametrize("mode", ["loop", "vmap"])
def test_scores_are_those_of_the_logits(mode):
    members = models()
    tokens, positions, labels = (x[0] for x in batch()[:3])
    logits = torch.stack([model(tokens, positions) for model in members])
    loss, right = Stack(members, mode=mode).scores(tokens, positions, labels)
    assert torch.equal(right, logits.argmax(-1) == labels)
    each = torch.nn.functional.cross_entropy(
        logits.flatten(0, 2), labels.expand(3, -1, -1).flatten(), ignore_index=IGNORE, reduction="none"
    )
    torch.testing.assert_close(loss, each.view(loss.shape), rtol=1e-12, atol=1e-12)


def test_what_weight_decay_spares():
    members = models()
    stack = Stack(members, mode="loop")
    spared = dict.fromkeys(stack.names, False)
    for name, part in zip(stack.names, stack.decay_mask("matrices").split(stack.sizes), strict=True):
        assert part.unique().numel() == 1
        spared[name] = part[0].item() == 0
    assert {n for n, s in spared.items() if not s} == {
        "embedding.weight",
        "position.weight",
        "blocks.0.mixer.proj.weight",
        "blocks.1.mixer.proj.weight",
    }
    assert stack.decay_mask("all").all()


class Told(Mixer):
    """Adds what it is told, counts how often it was calibrated, and says in which mode it runs."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.gain: Any = nn.Parameter(torch.ones(()))
        self.level = 0.0

    def forward(self, x, *changes):
        return self.gain * changes[0][..., None] + self.training * x

    @property
    def told_changes(self):
        return True

    @property
    def calibrates(self):
        return True

    def calibrate(self, x):
        self.level += float(x.abs().mean())

    def observe(self, x, *changes):
        return {"rate": changes[0].double().mean() * self.gain, "training": torch.tensor(float(self.training))}


@pytest.mark.parametrize("mode", ["loop", "vmap"])
def test_mixers_are_told_the_changes_and_observed(mode):
    spec = ModelSpec(d_model=8, block="mamba")
    members = [Model(spec, 13, 6, lambda layer: Told(8)) for _ in range(2)]
    tokens = torch.tensor([[1, 2, 3, 1], [1, 1, 1, 4]])
    for i, model in enumerate(members):
        model.changes = lambda tokens: tokens == 1
        layers: list[Any] = model.mixers()
        layers[0].gain.data.fill_(i)
        model.calibrate(tokens)
        assert all(0 < inner.level < 1.1 for inner in layers), "each layer, once"
    stack = Stack(members, mode=mode)
    assert stack.observe(tokens, [1, 0]) == [{"rate": 5 / 8, "training": 0.0}, {"rate": 5 / 16, "training": 0.0}]
    assert stack.models[0].training
    at = torch.zeros(2, 1, dtype=torch.int64)
    hard, soft = (stack.scores(tokens, at, at, soft=soft)[0] for soft in (False, True))
    assert not torch.equal(hard, soft)


def test_without_observations_nothing_is_run(monkeypatch):
    stack = Stack(models(), mode="loop")
    monkeypatch.setattr(Model, "forward", None)
    assert stack.observe(torch.zeros(1, 4, dtype=torch.int64), [0, 2]) == [{}, {}]


@pytest.mark.parametrize("mode", ["loop", "vmap"])
@pytest.mark.parametrize(("precision", "allowed"), [("tf32", True), ("fp32", False), ("bf16", False), ("fp16", False)])
def test_products_are_rounded_forward_and_backward_and_nowhere_else(mode, precision, allowed):
    flag, seen = torch.backends.cuda.matmul, []

    class Product(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            seen.append(("forward", flag.allow_tf32))
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, *grad_outputs):
            seen.append(("backward", flag.allow_tf32))
            return grad_outputs[0]

    class Looks(Average):
        def forward(self, x):
            return Product.apply(super().forward(x))

    torch.manual_seed(1)
    members = [Model(ModelSpec(d_model=8, positions="learned"), 13, 6, lambda layer: Looks(8)) for _ in range(3)]
    stack, (tokens, positions, labels, _) = Stack(members, mode=mode, precision=precision), batch()
    with rounding("fp32" if allowed else "tf32"):
        stack.loss_and_grad(tokens, positions, labels, None)
        assert {where for where, _ in seen} == {"forward", "backward"}
        stack.scores(tokens[0], positions[0], labels[0])
        assert flag.allow_tf32 is not allowed
    assert {on for _, on in seen} == {allowed}


@pytest.mark.parametrize("mode", ["loop", "vmap"])
def test_float16_gradients_are_those_of_float32_however_many_labels_share_them(mode):
    """A mean over 65,536 labels has gradients of 1e-8, below what float16 can hold."""
    torch.manual_seed(1)
    tokens = torch.randint(13, (2, 4096, 16))
    positions = torch.arange(16).expand(2, 4096, 16)
    labels = torch.where(torch.rand(2, 4096, 16) < 0.9, tokens, IGNORE)

    def grads(precision: str) -> torch.Tensor:
        torch.manual_seed(1)
        members = [Model(ModelSpec(d_model=8, positions="learned"), 13, 16, lambda layer: Average(8)) for _ in range(2)]
        return Stack(members, mode=mode, precision=precision).loss_and_grad(tokens, positions, labels, None)[1]

    exact = grads("fp32")
    assert (grads("fp16") - exact).norm() < 2e-3 * exact.norm()


@pytest.mark.parametrize("mode", ["loop", "vmap"])
def test_a_float16_gradient_that_overflows_is_right_at_a_smaller_scale(mode):
    class Steep(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, *grad_outputs):
            return (grad_outputs[0].half() * 256).float()

    class Looks(Average):
        def forward(self, x):
            return Steep.apply(super().forward(x))

    def grads(precision: str, scale: list[float]) -> torch.Tensor:
        torch.manual_seed(1)
        members = [Model(ModelSpec(d_model=8, positions="learned"), 13, 6, lambda layer: Looks(8)) for _ in range(3)]
        stack, (tokens, positions, labels, _) = Stack(members, mode=mode, precision=precision), batch()
        return stack.loss_and_grad(tokens, positions, labels, None, torch.tensor(scale))[1]

    exact, found = grads("fp32", [1.0] * 3), grads("fp16", [2**12, 2**-4, 2**-6])
    assert found.isfinite().all(1).tolist() == [False, True, True]
    assert (found[1:] - exact[1:]).norm() < 5e-3 * exact[1:].norm()
