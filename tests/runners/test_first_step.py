"""A stack's first gradient beside float32's by torch alone: equal where all is well, refused where a step is wrong."""

import contextlib

import pytest
import torch

from mixassay.kernels.linear_attention import registered
from mixassay.mixers import mixer
from mixassay.runners import first_step, train, training
from mixassay.runners.first_step import WrongStep
from mixassay.runners.stack import Stack
from mixassay.runners.tolerance import BY_TORCH, ERROR

from .test_train import spec


def stack_and_rows(monkeypatch, mode="vmap", **settings):
    monkeypatch.setattr(training, "mode", lambda *size: mode)
    monkeypatch.setattr(first_step, "ROWS", 3)
    members = [spec(seed, **{"precision": "fp32", "lr": 3e-3, **settings}) for seed in range(3)]
    state = training.Training(members, "cpu")
    return state.stack, state.first_rows()


@pytest.mark.parametrize("mode", ["loop", "vmap"])
@pytest.mark.parametrize("name", ["attention", "gated_deltanet", "dla_mamba2"])
def test_a_right_step_differs_by_rounding(mode, name, monkeypatch):
    stack, rows = stack_and_rows(monkeypatch, mode, mixer=name)
    before = stack.params.clone()
    assert first_step.errors(stack, *rows)[ERROR] < 1e-5
    assert torch.equal(stack.params, before)


def test_half_precision_differs_by_its_digits(monkeypatch):
    errors = {}
    for precision in ("fp32", "fp16", "bf16"):
        stack, rows = stack_and_rows(monkeypatch, precision=precision)
        errors[precision] = first_step.errors(stack, *rows)[ERROR]
    assert errors["fp32"] < 1e-5 < errors["fp16"] < errors["bf16"] < 0.1


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_what_digits_do_not_explain_is_asked_of_torchs_operators(precision, monkeypatch):
    """A kernel that is 40 % off, where rounding alone makes 1 % at most."""
    stack, rows = stack_and_rows(monkeypatch, precision=precision)
    before, right = stack.params.clone(), first_step.errors(stack, *rows)
    assert BY_TORCH not in right
    broken(monkeypatch, 2, lambda grad: 1.4 * grad)
    found = first_step.errors(stack, *rows)
    assert found[ERROR] == pytest.approx(0.4, abs=0.02)
    assert 1e-8 < found[BY_TORCH] < 0.1
    assert found[BY_TORCH] >= 0.5 * right[ERROR]
    assert torch.equal(stack.params, before)


@pytest.mark.parametrize(("edge", "refused"), [(1e-7, False), (1e-2, True)])
def test_rounding_that_takes_torchs_operators_as_far_is_no_kernels_fault(edge, refused):
    """The gradient of |w| for a w near 0 is either sign at a rounding of what w is the sum of; far from 0 it is not."""
    parts = torch.linspace(-1, 1, 64)
    parts[-1] += edge
    before = parts.clone()

    def by_torch(precision: str, nudge: first_step.Nudge = contextlib.nullcontext) -> first_step.Made:
        with nudge([parts]):
            w = parts.double().sum().requires_grad_()
            return w.detach(), torch.autograd.grad(w.abs(), w)[0].expand(3)

    loss, grad = by_torch("fp32")
    with pytest.raises(WrongStep, match="200% off") if refused else contextlib.nullcontext():
        assert first_step.compared((loss, -grad), (loss, grad), by_torch, "fp32") == {ERROR: 2, BY_TORCH: 2}
    assert torch.equal(parts, before)


def broken(monkeypatch, model, change):
    """What a wrong kernel gives: one model's gradient changed."""
    right = Stack.loss_and_grad

    def wrong(self, *given):
        loss, grad = right(self, *given)
        grad = grad.clone()
        grad[model] = change(grad[model])
        return loss, grad

    monkeypatch.setattr(Stack, "loss_and_grad", wrong)


@pytest.mark.parametrize("model", [0, 2])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda grad: grad * torch.inf, "the gradient is not finite, float32's is. No rounding explains"),
        (lambda grad: -grad, "the gradient is 200% off float32's. Rounding takes"),
    ],
)
def test_a_wrong_one_is_refused(model, change, message, monkeypatch):
    stack, rows = stack_and_rows(monkeypatch)
    broken(monkeypatch, model, change)
    with pytest.raises(WrongStep, match=message):
        first_step.errors(stack, *rows)


def test_a_format_that_overflows_is_told_from_a_kernel(monkeypatch):
    stack, rows = stack_and_rows(monkeypatch, precision="fp16")
    broken(monkeypatch, 0, lambda grad: grad + torch.nan)
    with pytest.raises(
        WrongStep, match=r"float16, which ends at 65,504, cannot hold this mixer \(train.precision tf32\)"
    ):
        first_step.errors(stack, *rows)


def test_a_gradient_that_is_finite_at_a_smaller_scale_is_no_fault(monkeypatch):
    """Training would leave out a few steps and go on."""
    stack, rows = stack_and_rows(monkeypatch, precision="fp16")
    right = Stack.loss_and_grad

    def coarse(self, tokens, positions, labels, keep, scale):
        loss, grad = right(self, tokens, positions, labels, keep, scale)
        return loss, torch.where(scale.unsqueeze(1) > 2**-7, torch.inf, grad)

    monkeypatch.setattr(Stack, "loss_and_grad", coarse)
    assert first_step.errors(stack, *rows)[ERROR] < 1e-2


def test_models_that_are_not_finite_themselves_are_left_to_training(monkeypatch):
    stack, rows = stack_and_rows(monkeypatch)
    stack.params.fill_(torch.nan)
    first_step.errors(stack, *rows)


def test_the_plain_model_uses_no_kernel(monkeypatch):
    """Not even where the variable asks for them: else it would compare them with themselves."""

    def refuse(*given, **more):
        raise AssertionError("a kernel was called")

    monkeypatch.setattr(registered, "linear_attention", refuse)
    stack, (tokens, positions, labels) = stack_and_rows(monkeypatch, mixer="linear_attention")
    monkeypatch.setenv("MIXASSAY_BACKEND", "triton")
    first_step.plain(stack, 0, tokens[0], positions[0], labels[0])


def test_runs_keep_what_was_found_and_a_continued_one_too(monkeypatch, tmp_path):
    monkeypatch.setattr(first_step, "checked", lambda device: True)
    calls = iter(range(1000))
    with pytest.raises(train.Interrupted):
        list(train.run([spec(0)], checkpoint=tmp_path, should_stop=lambda: next(calls) == 3))
    monkeypatch.setattr(first_step, "checked", lambda device: pytest.fail("the first step is long past"))
    (outcome,) = train.run([spec(0)], checkpoint=tmp_path)
    assert 0 <= outcome.metrics[ERROR] < 1e-9


def test_nothing_is_checked_on_a_cpu():
    (outcome,) = train.run([spec(0)])
    assert ERROR not in outcome.metrics


@pytest.mark.parametrize("name", mixer.names())
def test_every_mixer_can_be_checked(name, monkeypatch):
    stack, rows = stack_and_rows(monkeypatch, mixer=name)
    assert first_step.errors(stack, *rows)[ERROR] < 1e-3
