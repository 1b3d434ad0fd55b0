"""The language models' loop against the stack's, one process against two, and a run that was stopped against none."""

import itertools
import math
import time
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from mixassay.errors import UserError
from mixassay.mixers.mamba2 import Mamba2
from mixassay.model import build
from mixassay.runners import graph
from mixassay.runners import train as stacks
from mixassay.runners.lm import evaluate, loss, scale, work
from mixassay.runners.lm.batches import Batches
from mixassay.runners.lm.ranks import Ranks
from mixassay.runners.lm.train import How, run
from mixassay.runners.lm.training import Training, weights_digest
from mixassay.runners.outcome import Interrupted
from mixassay.runners.stream import Stream
from mixassay.spec import MixerSpec, ModelSpec, RunSpec, TaskSpec, TrainSpec
from mixassay.tasks import IGNORE, Rows

MODEL = ModelSpec(d_model=16, n_layers=2, block="swiglu")
TRAIN = TrainSpec(
    steps=12, batch_size=4, lr=3e-3, betas=(0.9, 0.95), warmup=0.2, clip=0.5, precision="fp64", eval_every=6, loop="lm"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "a.txt"
    file.write_text("".join(f"{n} bottles of beer on the wall, {n * n}.\n" for n in range(600)))
    cells = {"eval_cells": ({"seq_len": 48}, {"seq_len": 96})}
    args = {"files": [str(file)], "tokenizer": "bytes", "seq_len": 48}
    return TaskSpec(name="text", valid_examples=4, test_examples=4, **cells, **args)


def spec(task, mixer="linear_attention", **changes):
    named = MixerSpec(name=mixer)
    return RunSpec(suite="t", task=task, mixer=named, model=MODEL, train=TRAIN.model_copy(update=changes), seed=0)


def facts(outcome):
    names = ("status", "metrics", "eval", "curve", "stopped", "weights", "state_bytes")
    return {name: getattr(outcome, name) for name in names} | {"positions": outcome.language["positions"]}


def trained(spec, **how):
    (outcome,) = run([spec], how=How(**how))
    return outcome


def interrupted(spec, folder, step, how):
    """A run that is told to stop at this step, and goes on."""
    count = itertools.count(1)
    with pytest.raises(Interrupted):
        list(run([spec], checkpoint=folder, should_stop=lambda: next(count) == step, how=how[0]))
    (outcome,) = run([spec], checkpoint=folder, how=how[1])
    assert not folder.exists(), "the checkpoint is gone"
    return outcome


@pytest.mark.parametrize("mixer", ["attention", "mamba2", "dla"])
def test_it_trains_as_the_stack_does(mixer):
    """The same task, whose rows all have as many labels: the same losses and weights to 1e-9, and what a mixer says of
    itself."""
    sizes: Any = {"vocab_size": 32, "seq_len": 16, "num_kv": 2}
    task = TaskSpec(name="mqar", train_examples=64, valid_examples=40, test_examples=50, **sizes)
    (stacked,) = stacks.run([spec(task, mixer, loop="stack")])
    alone = trained(spec(task, mixer))
    assert alone.curve["step"] == stacked.curve["step"]
    for name in ("train/loss", "valid/loss", "valid/accuracy"):
        assert alone.curve[name] == pytest.approx(stacked.curve[name], abs=1e-9), name
    for name, value in stacked.metrics.items():
        assert alone.metrics[name] == pytest.approx(value, abs=1e-9), name
    assert ("valid/boundary_rate" in alone.metrics) == (mixer == "dla")
    assert alone.state_bytes == stacked.state_bytes
    assert alone.params == stacked.params


def test_micro_batches_add_up_to_the_batch(text):
    """Also where rows have different numbers of labels."""
    changes = {"seq_len": 760, "samples": ["niah_single_1"], "eval_cells": (), "valid_examples": 1}
    packed = TaskSpec.model_validate(text.model_dump() | changes)
    whole = Training(spec(packed), "cpu", Ranks())
    pieces = Training(spec(packed), "cpu", Ranks(), micro_batch=1)
    for _ in range(2):
        whole.advance()
        pieces.advance()
    for a, b in zip(whole.model.parameters(), pieces.model.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-12
    assert float(whole.loss_sum) == pytest.approx(float(pieces.loss_sum), abs=1e-12)


def test_speed_counts_the_tokens_of_every_length(text):
    cells = {"train_cells": ({"seq_len": 16, "weight": 3}, {"seq_len": 80, "weight": 1}), "valid_examples": 1}
    training = Training(spec(TaskSpec.model_validate(text.model_dump() | cells), "attention"), "cpu", Ranks())
    lengths = [training.stream.task_at(step).seq_len for step in range(TRAIN.steps or 0)]
    assert set(lengths) == {16, 80}
    training.advance()
    assert training.speed()["tokens_per_second"] is None  # of the first step alone nothing is known, and not 0
    assert "tokens/s" not in training.says()
    warm = max(lengths.index(16), lengths.index(80)) + 1  # steps, behind which no length is new
    for _ in range(warm + 1):
        training.advance()
    assert "tokens/s" in training.says()
    assert training.clock.last[0] == TRAIN.batch_size * sum(lengths[: warm + 2])
    assert training.clock.first is not None
    assert training.clock.first[0] == TRAIN.batch_size * sum(lengths[:warm])
    counted = TRAIN.batch_size * sum(lengths[warm : warm + 2]) / (training.clock.last[1] - training.clock.first[1])
    assert training.speed()["tokens_per_second"] == pytest.approx(counted)
    of = {T: work.per_token(training.model, MODEL, MixerSpec(name="attention"), T) for T in (16, 80)}
    assert of[16] < of[80]
    mean = sum(T * of[T] for T in lengths) / sum(lengths)
    assert training.speed()["flops_per_token"] == pytest.approx(mean)


def test_the_clock_waits_for_the_device_before_it_evaluates_or_writes(text, tmp_path, monkeypatch):
    """Else steps that are still under way count for nothing, and tokens a second are too many."""
    one = spec(text, eval_every=4)
    training = Training(one, "cpu", Ranks())
    training._batches = Batches(training.stream, 0, training.part).of("cpu", 0, workers=0)
    late = []
    clock = itertools.count()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: late.append(training.step))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    training.device = "cuda"
    for _ in range(12):
        training.advance()
    assert late == [4, 8, 10, 12], "where it validates, and every tenth step"
    before = training.training_seconds
    training.save(tmp_path / "state")
    assert late == [4, 8, 10, 12, 12]
    assert training.training_seconds == before + 1, "a tick of this clock"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mixer", ["mamba2", "gated_deltanet"])  # torch's attention has no fixed order of sums
def test_steps_that_a_gpu_replays_are_the_steps_as_written(text, mixer, monkeypatch):
    cells = {"train_cells": ({"seq_len": 16, "weight": 1}, {"seq_len": 80, "weight": 1}), "valid_examples": 1}
    ends = []
    for warm in (graph.WARM, 1000):
        monkeypatch.setattr(graph, "WARM", warm)
        changed = spec(TaskSpec.model_validate(text.model_dump() | cells), mixer, steps=20, precision="bf16")
        training = Training(changed, "cuda", Ranks(), micro_batch=2)
        for _ in range(20):
            training.advance()
        captured = [shape.graph is not None for shape in training.replay.shapes.values()]
        assert captured == [warm < 1000] * 2
        ends.append(weights_digest(training.model))
    assert ends[0] == ends[1]


def test_a_run_that_was_stopped_ends_as_one_that_was_not(text, tmp_path):
    for mixer, step in (("log_linear_mamba2", 4), ("gated_deltanet", 7)):
        run_spec = spec(text, mixer, precision="fp32")
        straight = trained(run_spec)
        resumed = interrupted(run_spec, tmp_path / mixer, step, (How(), How()))
        assert facts(resumed) == facts(straight)


def test_batches_made_ahead_are_the_batches(text):
    """By two processes, in order, from the step on where a stopped run goes on."""
    rows = Batches(Stream(text, TRAIN), 0, slice(1, 3))
    here, ahead = list(rows.of("cpu", 5, workers=0)), list(rows.of("cpu", 5, workers=2))
    assert len(here) == len(rows) - 5 == 7
    assert here[0][0].shape == (2, text.args["seq_len"])
    for made, wanted in zip(ahead, here, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))


def test_two_processes_equal_one(text, tmp_path):
    """And a run that two of them have begun is ended by one."""
    run_spec = spec(text, "mamba2")
    alone = trained(run_spec)
    begun = interrupted(run_spec, tmp_path / "state", 7, (How(ranks=2, micro_batch=1), How()))
    for name, values in alone.curve.items():
        assert begun.curve[name] == pytest.approx(values, abs=1e-10), name
    assert begun.metrics == pytest.approx(alone.metrics, abs=1e-10)


def test_what_is_calibrated_does_not_depend_on_how_rows_are_dealt_out(text, monkeypatch):
    monkeypatch.setattr(Ranks, "wrap", lambda self, module: module)
    run_spec = spec(text)
    run_spec = run_spec.model_copy(
        update={"mixer": MixerSpec.model_validate({"name": "dla", "tau": None, "capacity": 3})}
    )
    whole, pieces, shared = (
        Training(run_spec, "cpu", ranks, micro_batch=micro).model
        for ranks, micro in ((Ranks(), None), (Ranks(), 1), (Ranks(0, 2), None))
    )
    thresholds = {p.item() for name, p in whole.named_parameters() if name.endswith("tau")}
    assert len(thresholds - {0.6}) == 2
    assert weights_digest(pieces) == weights_digest(whole) == weights_digest(shared)


def test_ranks_share_a_batch():
    assert [Ranks(rank, 2).part(4) for rank in range(2)] == [slice(0, 2), slice(2, 4)]


def test_divergence_is_an_outcome(text):
    outcome = trained(spec(text, lr=1e200, clip=None, warmup=0.0))
    assert outcome.status == "diverged"
    assert outcome.stopped["step"] <= 6
    assert outcome.metrics == {}


@pytest.mark.parametrize("at_once", [1, 35, 10_000])
def test_the_loss_in_pieces_is_the_loss(at_once):
    g = torch.Generator().manual_seed(0)
    h = torch.randn(11, 6, generator=g, dtype=torch.float64).requires_grad_()
    weight = torch.randn(7, 6, generator=g, dtype=torch.float64).requires_grad_()
    labels = torch.randint(7, (11,), generator=g)
    labels[3] = IGNORE
    up = torch.randn(11, generator=g, dtype=torch.float64)
    expected = cross_entropy(h @ weight.T, labels, reduction="none", ignore_index=IGNORE)
    found = loss.token_losses(h, weight, labels, at_once)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    wanted = torch.autograd.grad(expected, (h, weight), up)
    for a, b in zip(torch.autograd.grad(found, (h, weight), up), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_every_row_weighs_the_same():
    g = torch.Generator().manual_seed(1)
    h, weight = torch.randn(2, 5, 4, generator=g), torch.randn(9, 4, generator=g)
    labels = torch.tensor([[1, 2, 3, 4, 5], [IGNORE, IGNORE, 8, IGNORE, IGNORE]])
    rows = loss.row_losses(labels)(h, weight)
    assert rows[0].item() == pytest.approx(cross_entropy(h[0] @ weight.T, labels[0]).item(), abs=1e-6)
    assert rows[1].item() == pytest.approx(cross_entropy(h[1, 2:3] @ weight.T, labels[1, 2:3]).item(), abs=1e-6)


@pytest.mark.parametrize("T", [1, 2, 9, 700])
def test_loss_by_position_is_a_running_mean(T):
    each = torch.randn(T, generator=torch.Generator().manual_seed(T), dtype=torch.float64)
    found = evaluate.by_position(each)
    half = found["window"] // 2
    assert found["window"] % 2 == 1
    assert found["at"][0] == 0
    assert found["at"][-1] == T - 1
    for at, value in zip(found["at"], found["loss"], strict=True):
        near = each[max(0, at - half) : at + half + 1]
        assert value == pytest.approx(near.mean().item(), abs=1e-12)


def test_an_answer_is_right_if_all_of_it_is():
    labelled = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 0, 1]]).bool()
    right = torch.tensor([[0, 1, 0, 1, 1], [1, 1, 0, 0, 0]]).bool()
    assert evaluate.answer_accuracy(labelled, right) == 0.5, "the second and third of four"
    labels = torch.where(labelled, 1, IGNORE)
    rows = Rows(torch.zeros(2, 5).long(), torch.arange(5).expand(2, 5), labels)
    found = evaluate.summary(rows, torch.where(labelled, 0.5, 0.0).double(), right)
    assert found == {"rows": 2, "scored": 6, "accuracy": pytest.approx(4 / 6), "loss": 0.5, "answer_accuracy": 0.5}


def test_scores_of_held_out_text_are_those_of_its_logits(text):
    training = Training(spec(text), "cpu", Ranks())
    rows = training.valid[0].rows
    each, right = evaluate.score(training.model, rows, "cpu", "fp32")
    with torch.no_grad():
        logits = training.model(rows.tokens)
    expected = cross_entropy(logits.flatten(0, 1), rows.labels.flatten(), reduction="none").view_as(each)
    torch.testing.assert_close(each, expected, rtol=0, atol=1e-9)
    assert torch.equal(right, logits.argmax(-1) == rows.labels)
    cells, positions, metrics = evaluate.evaluate(training.model, training.valid, "valid", "cpu", "fp32")
    assert [cell["cell"] for cell in cells] == [{"seq_len": 48}, {"seq_len": 96}]
    assert [len(p["at"]) for p in positions] == [48, 96]
    assert metrics["valid/loss"] == pytest.approx((cells[0]["loss"] + cells[1]["loss"]) / 2)
    assert metrics["valid/bits_per_byte"] == pytest.approx(metrics["valid/loss"] / math.log(2))


def test_held_out_rows_that_do_not_fit_in_memory_are_scored_in_smaller_batches(text, monkeypatch):
    training = Training(spec(text), "cpu", Ranks())
    rows, forward = training.valid[0].rows, training.model.forward
    loss, right = evaluate.score(training.model, rows, "cpu", "fp64")
    tried = []

    def cramped(tokens, **more):
        tried.append(len(tokens))
        if len(tokens) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(tokens, **more)

    monkeypatch.setattr(training.model, "forward", cramped)
    found = evaluate.score(training.model, rows, "cpu", "fp64")
    assert tried == [4, 2, 2]
    torch.testing.assert_close(found[0], loss, rtol=0, atol=1e-12)
    assert torch.equal(found[1], right)


def test_what_mixers_say_of_rows_that_do_not_fit_together(text, monkeypatch):
    training = Training(spec(text, "dla"), "cpu", Ranks())
    asked = training.model, training.valid, "valid", "cpu", "fp64"
    expected, forward = evaluate.observe(*asked), training.model.forward
    assert expected.keys() == {"valid/boundary_rate", "valid/slots"}

    def cramped(tokens, *more):
        found = forward(tokens, *more)
        if len(tokens) > 2:  # behind the layers, which have said it all
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    monkeypatch.setattr(training.model, "forward", cramped)
    assert evaluate.observe(*asked) == pytest.approx(expected)
    assert evaluate.observe(Training(spec(text), "cpu", Ranks()).model, *asked[1:]) == {}


def test_a_state_that_grows_is_measured_whatever_its_law_says(text, monkeypatch):
    training = Training(spec(text, "attention"), "cpu", Ranks())
    right = training._state_bytes()
    for inner in training.model.mixers():
        monkeypatch.setattr(type(inner), "state_law", "constant")
    assert training._state_bytes() == right
    assert right["96"] > right["48"]


@pytest.mark.parametrize("loop", ["lm", "stack"])
def test_what_a_mixer_says_of_itself_is_tried_before_it_trains(text, loop, monkeypatch):
    monkeypatch.setattr(Mamba2, "observe", lambda self, x: {"both": x[0, :2, 0]})
    for training in (Training, stacks.Training):
        monkeypatch.setattr(training, "advance", lambda self: pytest.fail("it trains"))
    runner = run if loop == "lm" else stacks.run
    sizes: Any = {"vocab_size": 32, "seq_len": 16, "num_kv": 2}
    task = text if loop == "lm" else TaskSpec(name="mqar", **sizes)
    with pytest.raises(UserError, match=r'Mamba2.observe gives a tensor of shape \[2\] for "both"'):
        list(runner([spec(task, "mamba2", loop=loop)]))


def test_work_of_a_token():
    """By hand: D = 16, attention 16 x 48 and 16 x 16, SwiGLU 16 x 80 and 40 x 16 (hidden 40), 50 words."""
    one = ModelSpec(d_model=16, n_layers=1, block="swiglu", mlp_ratio=3.75, positions="learned")
    args = {"name": "attention", "heads": 2}
    full, near = (MixerSpec.model_validate(args | more) for more in ({}, {"window": 8}))
    model = build(one, full, 50, 64)
    weights = 16 * 48 + 16 * 16 + 16 * 80 + 40 * 16 + 50 * 16
    assert work.per_token(model, one, full, 64) == 6 * weights + 6 * 2 * 16 * 32
    assert work.per_token(model, one, near, 64) == 6 * weights + 6 * 2 * 16 * (8 - 0.5)
    assert work.per_token(model, one, MixerSpec(name="mamba2"), 64) == 6 * weights
    assert work.peak("NVIDIA H200") == 989.4e12
    assert work.peak("cpu") is None


def test_sizes_of_the_papers_models():
    """Their parameters as published, and time that is operations over what the devices do."""
    found = {name: scale.need(MixerSpec.model_validate({"name": name, **args})) for name, args in scale.MIXERS.items()}
    assert [round(found[name].params / 1e6) for name in ("attention", "mamba2", "log_linear_mamba2")] == [693, 802, 825]
    assert found["mamba2"].flops == pytest.approx(50e9 * 6 * (802e6 - 49e6), rel=0.01), "the tied head counts once"
    assert found["mamba2"].seconds(8, 0.5) == pytest.approx(found["mamba2"].flops / (8 * 0.5 * 989.4e12))
    assert scale.measured(["mamba2=0.31"]) == {"mamba2": 0.31}
    for wrong in ("mamba2", "mamba2=x", "mamba3=0.3", "mamba2=31"):
        with pytest.raises(UserError, match="MFU"):
            scale.measured([wrong])
