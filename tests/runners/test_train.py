"""Training in a stack is training alone: seeds, learning rates, divergence, early stops and interruptions."""

import itertools
import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mixassay.errors import UserError
from mixassay.mixers import Mixer, mixer
from mixassay.runners import train, training
from mixassay.runners.chance import Drawn
from mixassay.runners.loss_scale import CALM, LossScale
from mixassay.runners.stack import Stack
from mixassay.runners.stream import Stream, turns
from mixassay.runners.worker import Task
from mixassay.spec import MixerSpec, ModelSpec, RunSpec, Stop, TaskSpec, TrainSpec

SIZES: Any = {"vocab_size": 32, "seq_len": 16, "num_kv": 2}
TASK = TaskSpec(name="mqar", train_examples=64, valid_examples=40, test_examples=50, **SIZES)
MODEL = ModelSpec(d_model=16, n_layers=2)
TRAIN = TrainSpec(steps=50, batch_size=8, lr=3e-3, precision="fp64", eval_every=25)
MIXERS = ["attention", "linear_attention", "mamba2", "gated_deltanet", "log_linear_mamba2", "log_linear_gated_deltanet"]


def spec(seed=0, *, mixer="linear_attention", task=TASK, model=MODEL, settings=TRAIN, **changes):
    return RunSpec(
        suite="t",
        task=task,
        mixer=MixerSpec(name=mixer),
        model=model,
        train=settings.model_copy(update=changes),
        seed=seed,
    )


def params_after(stack, monkeypatch, mode="loop"):
    monkeypatch.setattr(training, "mode", lambda *size: mode)
    state = training.Training(stack, "cpu")
    while state.step < state.stream.steps:
        state.advance()
    return state.stack.params


@pytest.mark.parametrize("mixer", MIXERS)
def test_stack_independence(mixer, monkeypatch):
    """Alone or in a stack of other seeds, learning rates and decays: the same weights to 1e-9 after 50 steps."""
    members = [
        spec(seed, mixer=mixer, lr=lr, weight_decay=wd, clip=1.0)
        for seed, lr, wd in [(0, 3e-3, 0.1), (1, 3e-3, 0.1), (0, 1e-2, 0.0)]
    ]
    alone = [params_after([member], monkeypatch, "loop")[0] for member in members]
    for mode in ("loop", "vmap"):
        stacked = params_after(members, monkeypatch, mode)
        for row, lone in zip(stacked, alone, strict=True):
            assert (row - lone).abs().max().item() < 1e-9, mode
        assert (stacked[0] - stacked[1]).abs().max().item() > 1e-3
        assert (stacked[0] - stacked[2]).abs().max().item() > 1e-3


def facts(outcome):
    """All of an outcome but its times and the size of its stack."""
    return {k: v for k, v in asdict(outcome).items() if k not in ("seconds", "ms_per_step", "stack")}


@pytest.mark.parametrize("mode", ["loop", "vmap"])
def test_a_diverged_member_is_recorded_and_its_neighbours_do_not_notice(mode, monkeypatch):
    monkeypatch.setattr(training, "mode", lambda *size: mode)
    wild, calm = spec(1, lr=1e200, steps=60), spec(0, steps=60)
    outcomes = {o.spec.train.lr: o for o in train.run([wild, calm])}
    (alone,) = train.run([calm])
    bad = outcomes[1e200]
    assert bad.status == "diverged"
    assert bad.metrics == {}
    assert bad.stopped["step"] < 10
    assert bad.error is not None
    assert "not finite" in bad.error["message"]
    assert "float16" not in bad.error["message"]
    assert outcomes[3e-3].status == "ok"
    assert outcomes[3e-3].curve["train/loss"] == pytest.approx(alone.curve["train/loss"], abs=1e-9)
    assert outcomes[3e-3].metrics == pytest.approx(alone.metrics, abs=1e-9)


def test_a_member_that_reaches_its_goal_leaves_and_the_others_go_on():
    goal = Stop(metric="valid/loss", below=3.45)
    members = [spec(0, lr=1e-9, stop=goal), spec(1, lr=3e-2, stop=goal)]
    outcomes = list(train.run(members))
    assert [o.spec.seed for o in outcomes] == [1, 0]
    assert outcomes[0].stopped["step"] == 25
    assert outcomes[0].stopped["reason"] == "valid/loss < 3.45"
    assert outcomes[1].stopped == {"step": 50, "reason": "steps"}
    (alone,) = train.run(members[:1])
    assert facts(outcomes[1])["metrics"] == pytest.approx(facts(alone)["metrics"], abs=1e-9)


@pytest.mark.parametrize("at", [1, 24, 25, 26, 49])
def test_an_interrupted_run_continues_bit_for_bit(at, tmp_path):
    goal = Stop(metric="valid/loss", below=3.45)
    members = [spec(0, lr=1e-9, stop=goal, precision="fp32"), spec(1, lr=3e-2, stop=goal, precision="fp32")]
    undisturbed = list(train.run(members))
    calls = itertools.count(1)
    run = train.run(members, checkpoint=tmp_path / "ck", should_stop=lambda: next(calls) == at)
    before = []
    with pytest.raises(train.Interrupted):
        before.extend(run)
    assert (tmp_path / "ck" / "state.json").exists()
    after = list(train.run(members, checkpoint=tmp_path / "ck"))
    assert [facts(o) for o in after] == [facts(o) for o in undisturbed]
    assert [facts(o) for o in before] == [facts(o) for o in undisturbed][: len(before)]
    assert not (tmp_path / "ck").exists()


class Plain(Mixer):
    """Nothing to learn, nothing kept."""

    def __init__(self, d_model: int) -> None:
        super().__init__()

    def forward(self, x):
        return x.cumsum(1)


class Counts(Plain):
    """Keeps a number of its own between steps."""

    seen: torch.Tensor

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen.add_(1)
        return (1 + self.seen) * x


class Drops(Plain):
    def forward(self, x):
        return F.dropout(x, 0.5, self.training)


class Answerless(Plain):
    def forward(self, x) -> Any:
        return x, x


@pytest.fixture(params=[Plain])
def own(request):
    """The name of a mixer that is registered for the length of a test."""
    mixer._found["own"] = request.param
    yield "own"
    del mixer._found["own"]


def test_a_mixer_without_parameters_trains(own):
    (outcome,) = train.run([spec(mixer=own, steps=3)])
    assert (outcome.status, outcome.state_bytes) == ("ok", {})


@pytest.mark.parametrize("own", [Counts], indirect=True)
@pytest.mark.parametrize("way", ["loop", "vmap"])
def test_what_a_mixer_keeps_between_steps_is_in_checkpoints_and_in_its_weights(own, way, monkeypatch, tmp_path):
    monkeypatch.setattr(training, "mode", lambda *size: way)
    specs, kept = [spec(0, mixer=own), spec(1, mixer=own)], []
    whole = list(train.run(specs, keep=lambda spec, tensors: kept.append(tensors)))
    turns = itertools.count(1)
    with pytest.raises(train.Interrupted):
        list(train.run(specs, checkpoint=tmp_path / "ck", should_stop=lambda: next(turns) >= 20))
    assert [facts(o) for o in train.run(specs, checkpoint=tmp_path / "ck")] == [facts(o) for o in whole]
    assert [tensors["blocks.0.mixer.seen"].item() for tensors in kept] == [TRAIN.steps] * 2


@pytest.mark.parametrize("own", [Drops], indirect=True)
def test_a_mixer_that_draws_from_the_global_generator_is_refused(own):
    with pytest.raises(Drawn, match="no run could be repeated"):
        list(train.run([spec(mixer=own)]))


@pytest.mark.parametrize("own", [Answerless], indirect=True)
def test_a_mixer_that_returns_no_tensor_is_told(own):
    with pytest.raises(UserError, match=r"Answerless.forward returned tuple for x of shape \[8, 16, 16\]"):
        list(train.run([spec(mixer=own)]))


def test_an_outcome_counts_the_live_part_of_a_state():
    (outcome,) = train.run([spec(0, mixer="log_linear_attention")])
    layers, slot = 2, 8 * 16 * 16
    assert outcome.live_state_bytes["16"] == outcome.state_bytes["16"] - layers * (15 - 5) * slot  # float64


@pytest.mark.parametrize("what", ["state.json", "step-*"])
def test_a_damaged_checkpoint_is_told_and_not_used(what, tmp_path, capsys):
    with pytest.raises(train.Interrupted):
        list(train.run([spec(0)], checkpoint=tmp_path / "ck", should_stop=lambda: True))
    (damaged,) = (tmp_path / "ck").glob(what)
    damaged.write_bytes(damaged.read_bytes()[:10])
    fresh, again = list(train.run([spec(0)])), list(train.run([spec(0)], checkpoint=tmp_path / "ck"))
    assert "is damaged" in capsys.readouterr().err
    assert [facts(o) for o in fresh] == [facts(o) for o in again]


def test_a_damaged_note_of_members_is_written_anew(tmp_path):
    task = Task("job", {"a": spec(0), "b": spec(1)}, tmp_path, done={"a"})
    (tmp_path / "state").mkdir()
    (tmp_path / "members.json").write_text('["a", "')
    assert task.stack() == [spec(1)]
    assert (tmp_path / "members.json").read_text() == '["b"]'


def test_a_checkpoint_of_other_members_is_not_used(tmp_path):
    with pytest.raises(train.Interrupted):
        list(train.run([spec(0)], checkpoint=tmp_path / "ck", should_stop=lambda: True))
    fresh, resumed = list(train.run([spec(1)])), list(train.run([spec(1)], checkpoint=tmp_path / "ck"))
    assert [facts(o) for o in fresh] == [facts(o) for o in resumed]


def test_an_outcome_says_what_was_measured():
    (outcome,) = train.run([spec(0, mixer="attention", precision="fp32")])
    assert outcome.status == "ok"
    assert set(outcome.metrics) == {"valid/accuracy", "valid/loss", "test/accuracy", "test/loss"}
    assert [(e["split"], e["rows"], e["scored"]) for e in outcome.eval] == [("valid", 40, 80), ("test", 50, 100)]
    assert outcome.curve["step"] == [25, 50]
    assert outcome.state_bytes == {"16": training.Training([outcome.spec], "cpu").stack.models[0].state_bytes(16)}
    assert outcome.state_bytes["16"] >= 2 * 2 * 16 * 16 * 4  # two layers of keys and values in float32
    assert outcome.live_state_bytes == {}, "all of it is live"
    assert outcome.seconds > 0
    assert outcome.ms_per_step > 0


RECALL: Any = {"seq_len": 64, "segments": 2, "pool": 4, "cur": 1, "prev": 1, "tag": 2, "num_tags": 3, "num_keys": 6}


def test_slots_follow_the_segments_of_a_task_or_what_the_first_batch_says():
    task = TaskSpec(name="segmented_recall", valid_examples=40, test_examples=20, **RECALL)
    for cuts, tau, gate in (("oracle", 0.6, "ste"), ("scored", None, "soft")):
        args: dict[str, Any] = {"capacity": 4, "cuts": cuts, "tau": tau, "boundary_gate": gate}
        mixer = MixerSpec(name="dla", **args)
        run = spec(task=task, steps=2, eval_every=2).model_copy(update={"mixer": mixer})
        state = training.Training([run], "cpu")
        if cuts == "scored":
            taus = [p for name, p in state.stack.models[0].named_parameters() if name.endswith("tau")]
            assert [bool(abs(found.item() - 0.6) > 1e-3) for found in taus] == [True, True]
        state.advance()
        state.advance()
        (outcome,) = state.settle()
        assert ("valid/soft_accuracy" in outcome.metrics) == (cuts == "scored")
        if cuts == "oracle":
            assert outcome.metrics["valid/boundary_rate"] == pytest.approx(3 / 64)
            assert outcome.metrics["valid/slots"] == 3


def test_the_loss_falls_and_a_seed_moves_the_number():
    settings = TRAIN.model_copy(update={"steps": 300, "precision": "fp32", "lr": 1e-2, "eval_every": 100})
    task = TASK.model_copy(update={"train_examples": "endless"})
    outcomes = list(train.run([spec(s, mixer="attention", task=task, settings=settings) for s in range(2)]))
    for outcome in outcomes:
        first, *_, last = outcome.curve["train/loss"]
        assert last < first - 0.2
    assert outcomes[0].weights != outcomes[1].weights
    assert outcomes[0].metrics["test/loss"] != outcomes[1].metrics["test/loss"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_precisions_start_from_the_same_weights_and_train(precision):
    exact = training.Training([spec(3)], "cpu").stack.params
    other = training.Training([spec(3, precision=precision)], "cpu").stack.params
    assert torch.equal(exact.float(), other)
    (outcome,) = train.run([spec(3, precision=precision)])
    assert math.isfinite(outcome.metrics["test/loss"])


def overflowing(monkeypatch, above):
    """Gradients of the second of two members overflow at scales `above` this."""
    exact = Stack.loss_and_grad

    def coarse(self, tokens, positions, labels, keep, scale):
        loss, grad = exact(self, tokens, positions, labels, keep, scale)
        if len(self) == 2:
            grad[1] = torch.where(scale[1] > above, torch.inf, grad[1])
        return loss, grad

    monkeypatch.setattr(Stack, "loss_and_grad", coarse)


def test_a_float16_step_that_overflows_is_left_out_and_its_scale_halved(monkeypatch, tmp_path):
    members = [spec(0, precision="fp16"), spec(1, lr=1e-2, precision="fp16")]
    fine = list(train.run(members))
    overflowing(monkeypatch, above=0.2)
    neighbour, found = train.run(members)
    assert found.status == "ok"
    assert found.metrics["train/skipped_steps"] == 3  # at 1, 1/2 and 1/4
    assert found.metrics["test/loss"] == pytest.approx(fine[1].metrics["test/loss"], abs=0.1)
    assert facts(neighbour) == facts(fine[0])
    calls = itertools.count(1)
    with pytest.raises(train.Interrupted):
        list(train.run(members, checkpoint=tmp_path, should_stop=lambda: next(calls) == 2))
    assert [facts(o) for o in train.run(members, checkpoint=tmp_path)] == [facts(neighbour), facts(found)]


def test_gradients_that_are_finite_at_no_scale_are_a_divergence(monkeypatch):
    overflowing(monkeypatch, above=0.0)
    neighbour, lost = sorted(
        train.run([spec(0, precision="fp16"), spec(1, precision="fp16")]), key=lambda o: o.spec.seed
    )
    assert neighbour.status == "ok"
    assert lost.status == "diverged"
    assert lost.stopped["step"] == 16
    assert lost.error is not None
    assert "not finite at step 16; float16 ends at 65,504, train.precision tf32" in lost.error["message"]


def test_a_scale_is_doubled_after_calm_steps_and_not_beyond_one():
    scale = LossScale.start(2, "cpu")
    once = torch.tensor([True, False])
    assert scale.adjust(once).tolist() == [True, False]
    for _ in range(CALM):
        assert scale.value.tolist() == [0.5, 1.0]
        scale.adjust(torch.tensor([False, False]))
    assert scale.value.tolist() == [1.0, 1.0]
    assert scale.skipped.tolist() == [1, 0]


def test_dropout_is_a_members_own():
    model = MODEL.model_copy(update={"dropout": 0.3})
    members = [spec(s, model=model) for s in range(2)]
    stacked = {o.spec.seed: o for o in train.run(members)}
    (alone,) = train.run(members[1:])
    assert stacked[1].metrics == pytest.approx(alone.metrics, abs=1e-9)
    (dry,) = train.run([spec(1)])
    assert dry.metrics["test/loss"] != alone.metrics["test/loss"]


# What is trained on


def seen(stream, seeds=(0,)):
    return [stream.rows(step, seeds, "cpu").tokens for step in range(stream.steps)]


def pairs(stream, step):
    cell: Any = stream.task_at(step)
    return cell.num_kv


def as_set(tokens):
    return {tuple(row) for row in torch.cat(tokens).tolist()}


def test_an_epoch_visits_every_row_of_the_fixed_set_once():
    stream = Stream(TASK, TrainSpec(epochs=3, batch_size=16))
    assert stream.steps == 12
    epochs = [torch.cat(seen(stream)[e * 4 : e * 4 + 4]) for e in range(3)]
    rows = [sorted(map(tuple, epoch.tolist())) for epoch in epochs]
    assert rows[0] == rows[1] == rows[2]
    assert len(set(rows[0])) == 64
    assert not torch.equal(epochs[0], epochs[1])


def test_endless_rows_never_repeat_and_differ_by_seed():
    task = TASK.model_copy(update={"train_examples": "endless"})
    stream = Stream(task, TrainSpec(steps=20, batch_size=16))
    assert len(as_set(seen(stream))) == 20 * 16
    assert not as_set(seen(stream)) & as_set(seen(stream, (1,)))


def test_data_seed_fixes_the_rows_but_not_their_order():
    stream = Stream(TASK.model_copy(update={"data_seed": 123}), TrainSpec(epochs=1, batch_size=16))
    assert as_set(seen(stream, (0,))) == as_set(seen(stream, (1,)))
    assert not torch.equal(seen(stream, (0,))[0], seen(stream, (1,))[0])


def test_rows_are_the_same_for_every_mixer_width_and_stack():
    stream = Stream(TASK, TRAIN)
    other = Stream(TASK, TRAIN.model_copy(update={"lr": 1.0}))
    pair = stream.rows(7, (0, 1), "cpu").tokens
    assert torch.equal(pair[:8], other.rows(7, (0,), "cpu").tokens)
    assert torch.equal(pair[8:], other.rows(7, (1,), "cpu").tokens)


def test_a_mixture_visits_its_cells_by_their_rows_or_weights():
    cells = ({"num_kv": 1, "examples": 96}, {"num_kv": 4, "examples": 32})
    task = TASK.model_copy(update={"train_cells": cells})
    stream = Stream(task, TrainSpec(epochs=2, batch_size=16))
    order = [pairs(stream, step) for step in range(stream.steps)]
    assert len(order) == 16
    assert sorted(order[:8]) == sorted(order[8:]) == [1] * 6 + [4] * 2
    assert order[:8] != sorted(order[:8])
    weighted = TASK.model_copy(
        update={
            "train_examples": "endless",
            "train_cells": ({"num_kv": 1, "weight": 3.0}, {"num_kv": 4, "weight": 1.0}),
        }
    )
    stream = Stream(weighted, TrainSpec(steps=2000, batch_size=4))
    share = sum(pairs(stream, step) == 1 for step in range(2000)) / 2000
    assert abs(share - 0.75) < 4 * math.sqrt(0.75 * 0.25 / 2000)  # four standard errors


@pytest.mark.parametrize(("members", "batch", "way"), [(2, 8, "vmap"), (1, 8, "loop"), (2, 32, "loop")])
def test_how_a_stack_runs_depends_on_its_sizes_alone(members, batch, way):
    state = training.Training([spec(seed, batch_size=batch) for seed in range(members)], "cpu")
    assert state.stack.mode == way
    assert training.mode("cuda", members, batch * 16 * 16) == "vmap"


def test_turns_count_visits():
    assert turns(torch.tensor([0, 1, 0, 0, 1]), 2).tolist() == [0, 0, 1, 2, 1]
