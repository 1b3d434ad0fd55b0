"""A language model's first gradient beside float32's by torch alone."""

import itertools

import pytest
import torch

from mixassay.kernels import use_backend
from mixassay.model import Model
from mixassay.runners import first_step as stacks
from mixassay.runners.first_step import WrongStep
from mixassay.runners.lm import first_step, train
from mixassay.runners.lm.ranks import Ranks
from mixassay.runners.lm.training import Training
from mixassay.runners.tolerance import BY_TORCH, ERROR, LAST
from mixassay.tasks import IGNORE

from .test_lm import spec, text  # noqa: F401

CELLS = {"train_cells": ({"seq_len": 16, "weight": 1}, {"seq_len": 40, "weight": 1})}


@pytest.fixture
def run(text):  # noqa: F811
    """(model, spec, stream) of a mixture of two lengths, by mixer and precision."""

    def made(mixer="log_linear_mamba2", precision="fp32"):
        task = text.model_copy(update=CELLS)
        training = Training(spec(task, mixer, precision=precision), "cpu", Ranks())
        return training.model, training.spec, training.stream

    return made


@pytest.mark.parametrize("mixer", ["attention", "log_linear_mamba2", "dla_mamba2", "gated_deltanet"])
def test_a_right_gradient_differs_by_rounding(run, mixer):
    model, *rest = run(mixer)
    assert first_step.errors(model, *rest)[ERROR] < 1e-5
    assert all(p.grad is None for p in model.parameters())


def test_bf16_differs_by_its_digits(run):
    assert 1e-4 < first_step.errors(*run(precision="bf16"))[ERROR] < 0.1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_digits_do_not_explain_is_asked_of_torchs_operators(run, precision, monkeypatch):
    right = first_step.kernels
    model, *rest = run(precision=precision)
    before, alone = [p.clone() for p in model.parameters()], first_step.errors(model, *rest)

    def wrong(model, precision, tokens, labels):
        loss, grad = right(model, precision, tokens, labels)
        return loss, 1.4 * grad

    monkeypatch.setattr(first_step, "kernels", wrong)
    found = first_step.errors(model, *rest)
    assert BY_TORCH not in alone
    assert found[ERROR] == pytest.approx(0.4, abs=0.02)
    assert 1e-8 < found[BY_TORCH] < 0.1
    assert found[BY_TORCH] >= 0.5 * alone[ERROR]
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("length", [16, 40])
def test_a_wrong_one_is_refused_at_either_length(run, length, monkeypatch):
    right = first_step.kernels

    def wrong(model, precision, tokens, labels):
        loss, grad = right(model, precision, tokens, labels)
        return loss, grad * (-1 if tokens.shape[1] == length else 1)

    monkeypatch.setattr(first_step, "kernels", wrong)
    with pytest.raises(WrongStep, match="the gradient is 200% off float32's"):
        first_step.errors(*run())


def test_a_row_that_does_not_fit_is_halved(run, monkeypatch):
    """The same tokens go through both forms."""
    seen, right = [], Model.forward

    def small(self, tokens, *given, **more):
        if tokens.shape[1] > 12:
            raise torch.OutOfMemoryError("out of memory")
        seen.append(tokens.shape)
        return right(self, tokens, *given, **more)

    monkeypatch.setattr(Model, "forward", small)
    assert first_step.errors(*run())[ERROR] < 1e-5
    assert {shape[1] for shape in seen} == {8, 10}


@pytest.mark.parametrize(("patience", "lengths"), [(0, [16]), (60, [16, 40])])
def test_long_rows_are_left_out_where_torchs_form_takes_too_long(run, patience, lengths, monkeypatch):
    seen, right = [], first_step.kernels

    def look(model, precision, tokens, labels):
        seen.append(tokens.shape[1])
        return right(model, precision, tokens, labels)

    monkeypatch.setattr(first_step, "kernels", look)
    monkeypatch.setattr(first_step, "PATIENCE", patience)
    first_step.errors(*run())
    assert seen == lengths


def test_a_half_ends_with_the_last_label():
    tokens = torch.arange(20).view(2, 10)
    labels = torch.full((2, 10), IGNORE)
    labels[0, 6], labels[1, 1] = 7, 7
    half, its = first_step.half(tokens, labels)
    assert half.tolist() == [[2, 3, 4, 5, 6], [10, 11, 12, 13, 14]]
    assert ((its != IGNORE).sum(1) == 1).all()


def test_a_compiled_block_keeps_no_choice_of_operators(run):
    """`plain` asks for torch's; a block that was compiled meanwhile must not do so for good."""
    model, *rest = run("attention")
    asked = []
    for block in model.blocks:
        right = block.forward
        block.forward = lambda *given, right=right, **more: (
            asked.append(torch.compiler.is_compiling()),
            right(*given, **more),
        )[1]
        block.compile(backend="eager")
    first_step.errors(model, *rest)
    assert asked
    assert not any(asked)


def test_runs_keep_what_was_found_and_a_continued_one_too(text, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setattr(stacks, "checked", lambda device: True)
    count = itertools.count(1)
    with pytest.raises(train.Interrupted):
        list(train.run([spec(text)], checkpoint=tmp_path, should_stop=lambda: next(count) == 3))
    monkeypatch.setattr(stacks, "checked", lambda device: pytest.fail("the first step is long past"))
    (outcome,) = train.run([spec(text)], checkpoint=tmp_path)
    assert 0 <= outcome.metrics[ERROR] < 1e-9
    assert 0 <= outcome.metrics[LAST[ERROR]] < 1e-9


def test_a_kernel_that_is_wrong_for_trained_weights_is_found_and_costs_no_run(text, monkeypatch):  # noqa: F811
    monkeypatch.setattr(stacks, "checked", lambda device: True)
    right, fresh = first_step.kernels, []

    def wrong(model, precision, tokens, labels):
        loss, grad = right(model, precision, tokens, labels)
        fresh.append(model.embedding.weight.detach().clone())
        return loss, grad if torch.equal(fresh[0], fresh[-1]) else -grad

    monkeypatch.setattr(first_step, "kernels", wrong)
    (outcome,) = train.run([spec(text)])
    assert outcome.status == "ok"
    assert outcome.metrics[ERROR] < 1e-9
    assert outcome.metrics[LAST[ERROR]] == pytest.approx(2)


def test_two_processes_check_once(text, monkeypatch):  # noqa: F811
    monkeypatch.setattr(stacks, "checked", lambda device: True)
    (outcome,) = train.run([spec(text)], how=train.How(ranks=2))
    assert outcome.metrics[ERROR] < 1e-9


def test_the_plain_model_uses_no_kernel(run, monkeypatch):
    def refuse(*given, **more):
        raise AssertionError("a kernel was called")

    monkeypatch.setattr("mixassay.kernels.linear_attention.registered.linear_attention", refuse)
    model, *_ = run("mamba2")
    with use_backend("triton"):
        first_step.plain(model, torch.randint(9, (1, 8)), torch.randint(9, (1, 8)))
