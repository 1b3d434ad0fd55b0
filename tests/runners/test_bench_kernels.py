"""The benchmark of the operators: what was not found right is not timed, what was measured is kept, peers may fail."""

import importlib
import itertools
import json
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mixassay.errors import UserError
from mixassay.kernels.dla.boundaries import boundaries
from mixassay.runners import bench_kernels, bench_records, floors, peers, timing
from mixassay.runners.bench_kernels import PASSES, Setting
from mixassay.runners.operators import ARGUMENTS, THRESHOLD, Call, Inputs, Shape, cut, draw, gate_bytes, operator
from mixassay.runners.peers import Implementation

TINY: dict[str, Any] = {"lengths": (16,), "heads": {8: 2}, "tokens": 32, "checked": 13, "budget": 1e-4}
CPU = torch.device("cpu")


def measured(*ops: str, dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    return list(bench_kernels.bench_kernels(Setting(CPU, ops=ops, dtype=dtype, **TINY)))


def spoilt(op: str, spoil: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[str, str], Call]:
    """`operators.operator`, with the torch form of one operator spoilt."""

    def replacement(name: str, backend: str) -> Call:
        call = operator(name, backend)
        return (lambda inputs: spoil(call(inputs))) if (name, backend) == (op, "torch") else call

    return replacement


def as_peer(monkeypatch: pytest.MonkeyPatch, call: Call | None, note: str | None = None) -> None:
    monkeypatch.setattr(bench_kernels, "peers", lambda *_: [Implementation("a peer", call, version="1.2", note=note)])


def test_every_operator_is_checked_and_timed() -> None:
    records = measured(*ARGUMENTS)
    assert json.loads(json.dumps(records, allow_nan=False)) == records
    mine = [record for record in records if record["ours"]]
    assert [record["op"] for record in mine] == list(ARGUMENTS)
    for record in mine:
        assert not bench_kernels.failed(record)
        assert {name: record[name] for name in "BTHD"} == {"B": 2, "T": 16, "H": 2, "D": 8}
        assert record["env"]["device"] == "cpu"
        assert {"commit", "dirty", "source", "version"} <= set(record["code"])
        gradients = {f"d{name}" for name in ARGUMENTS[record["op"]]}
        for which, names in zip(PASSES, ({"o"}, {"o"} | gradients), strict=True):
            found = record[which]
            for errors in found["errors"].values():
                assert set(errors) == names
                assert max(errors.values()) < record["limit"]
            assert found["ms_min"] <= found["ms_p20"] <= found["ms"] <= found["ms_p80"]
            assert found["tokens_per_s"] == pytest.approx(1e3 * 32 / found["ms"])
            assert found["floor_ms"] is None, "a CPU's rates are not measured"
            assert found["peak_bytes"] is None


def test_times_stand_beside_floors_where_rates_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = floors.Rates(1e9, 1e12)
    monkeypatch.setattr(timing.Clock, "rates", lambda *_: rates)
    monkeypatch.setattr(timing.Clock, "peak_bytes", lambda *_: 123)
    record = measured("gated_delta_rule")[0]
    assert record["rates"] == {"bytes_per_s": 1e9, "flops_per_s": 1e12}
    works = [f("gated_delta_rule", 16, 8, 8, width=4, gates=8) for f in (floors.forward, floors.backward)]
    forward, backward = (floors.ms(work, rates, 2 * 16 * 2) for work in works)
    for which, floor in zip(PASSES, (forward, forward + backward), strict=True):
        assert record[which]["floor_ms"] == pytest.approx(floor)
        assert record[which]["fraction_of_floor"] == pytest.approx(floor / record[which]["ms"])
        assert record[which]["peak_bytes"] == 123


def test_bfloat16_is_held_to_its_own_limit() -> None:
    (record,) = measured("log_linear_gated_delta_rule", dtype=torch.bfloat16)
    assert not bench_kernels.failed(record)
    assert record["limit"] == 2e-2
    assert max(record["forward_backward"]["errors"]["timed"].values()) > 1e-4, "it is bfloat16 indeed"


def test_a_wrong_output_is_not_timed_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kernels, "operator", spoilt("linear_attention", lambda o: 1.1 * o))
    wrong, right = [r for r in measured("linear_attention", "gated_delta_rule") if r["ours"]]
    assert bench_kernels.failed(wrong)
    assert not bench_kernels.failed(right)
    for which in PASSES:
        assert wrong[which]["status"] == "wrong"
        assert "o 1.0e-01" in wrong[which]["reason"]
        assert "ms" not in wrong[which]


def test_a_wrong_gradient_is_not_timed_nor_is_its_right_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kernels, "operator", spoilt("linear_attention", lambda o: 2 * o - o.detach()))
    wrong = measured("linear_attention")[0]
    assert wrong["forward"]["status"] == "ok"
    assert "dq 1.0e+00" in wrong["forward_backward"]["reason"]
    assert all("ms" not in wrong[which] for which in PASSES)


def test_what_is_not_finite_is_wrong_and_valid_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kernels, "operator", spoilt("linear_attention", lambda o: o * float("nan")))
    wrong = measured("linear_attention")[0]
    assert "o not finite" in wrong["forward"]["reason"]
    assert wrong["forward"]["errors"]["short"] == {"o": None}
    json.dumps(wrong, allow_nan=False)


@pytest.mark.parametrize(
    ("problem", "status"),
    [(RuntimeError("no such kernel\nmore"), "error"), (torch.OutOfMemoryError("none left"), "oom")],
)
def test_a_peer_that_raises_is_a_record(monkeypatch: pytest.MonkeyPatch, problem: Exception, status: str) -> None:
    def call(inputs: Inputs) -> torch.Tensor:
        raise problem

    as_peer(monkeypatch, call)
    mine, peer = measured("linear_attention")
    assert not bench_kernels.failed(mine)
    assert not bench_kernels.failed(peer), "peers do not decide about us"
    assert peer["forward"]["status"] == status
    assert "ms" not in peer["forward"]
    assert str(problem).split("\n")[0] in peer["forward"]["reason"]
    assert "more" not in peer["forward"]["reason"]


def test_a_peer_without_a_backward_is_timed_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, o: torch.Tensor) -> torch.Tensor:
            return o.clone()

    right = operator("linear_attention", "torch")
    as_peer(monkeypatch, lambda inputs: NoBackward.apply(right(inputs)))  # type: ignore[no-any-return, no-untyped-call]
    peer = measured("linear_attention")[1]
    assert peer["forward"]["ms"] > 0
    assert peer["forward_backward"]["status"] == "unsupported"


def test_a_peer_that_is_wrong_is_timed_and_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    right = operator("linear_attention", "torch")
    as_peer(monkeypatch, lambda inputs: 1.5 * right(inputs))
    mine, peer = measured("linear_attention")
    assert not bench_kernels.failed(mine)
    assert peer["forward"]["status"] == "wrong"
    assert peer["forward"]["ms"] > 0


def test_a_peer_is_judged_on_the_inputs_that_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = operator("linear_attention", "torch")
    as_peer(monkeypatch, lambda inputs: right(inputs) * (2.0 if inputs["q"].shape[1] == TINY["checked"] else 1.0))
    peer = measured("linear_attention")[1]
    assert peer["forward"]["status"] == "ok"
    assert peer["forward"]["errors"]["short"]["o"] == pytest.approx(1.0)


def test_ours_must_also_be_right_on_the_inputs_that_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The truth there is of one head in float64, so a form that is wrong in a narrower dtype is seen."""

    def replacement(name: str, backend: str) -> Call:
        call = operator(name, backend)
        return lambda x: call(x) * (2.0 if x["q"].shape[1] == 16 and x["q"].dtype == torch.float32 else 1.0)

    monkeypatch.setattr(bench_kernels, "operator", replacement)
    mine = measured("linear_attention")[0]
    assert mine["forward"]["status"] == "wrong"
    assert mine["forward"]["errors"]["timed"]["o"] == pytest.approx(1.0)
    assert "ms" not in mine["forward"]


@pytest.mark.parametrize("without", ["reference", "torch"])
def test_without_the_definition_nothing_is_timed_and_without_the_other_truth_it_is_said(
    monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    truth = bench_kernels.truth

    def no_memory(op: str, inputs: Inputs, do: torch.Tensor, backend: str) -> Any:
        if backend == without:
            raise torch.OutOfMemoryError("none left")
        return truth(op, inputs, do, backend)

    monkeypatch.setattr(bench_kernels, "truth", no_memory)
    mine, flash, _ = measured("softmax_attention")
    for record in (mine, flash):
        for which in PASSES:
            timed = record[which]["status"] == "ok"
            assert timed == ("ms" in record[which]) == (without == "torch" or record is flash)
        assert record["unchecked"] == ("none left" if without == "torch" else None)
    if without == "reference":
        assert mine["forward"]["reason"] == "no truth to check against: none left"


def test_blocks_of_rows_are_softmax_attention() -> None:
    inputs, do = draw("softmax_attention", Shape(1, 11, 2, 4), torch.float64, CPU, seed=0)
    blocks = bench_kernels.outcome(lambda x: bench_kernels.softmax_by_rows(x, rows=4), inputs, do, PASSES[1])
    whole = bench_kernels.outcome(operator("softmax_attention", "reference"), inputs, do, PASSES[1])
    for name, x in whole.items():
        torch.testing.assert_close(blocks[name], x)


@pytest.mark.parametrize("op", ARGUMENTS)
def test_inputs_are_as_in_the_models(op: str) -> None:
    inputs, do = draw(op, Shape(2, 20, 3, 8), torch.bfloat16, CPU, seed=0)
    assert list(inputs) == list(ARGUMENTS[op])
    assert all(x.is_leaf and x.requires_grad for x in inputs.values())
    assert do.shape == inputs["v"].shape
    assert {x.dtype for n, x in inputs.items() if n in "qkv"} == {torch.bfloat16}
    if "beta" in inputs:
        torch.testing.assert_close(inputs["k"].float().norm(dim=-1), torch.ones(2, 20, 3), rtol=1e-2, atol=0)
        assert ((inputs["beta"] > 0) & (inputs["beta"] < 1)).all()
    if "log_decay" in inputs:
        assert (inputs["log_decay"] < 0).all()
        assert inputs["log_decay"].dtype == torch.float32
    levels = 6 if "level_scale" in inputs else 30 if "rank_scale" in inputs else 0  # 20 tokens
    assert gate_bytes(inputs) == 4 * (levels + ("beta" in inputs) + ("log_decay" in inputs))


def test_dynamic_linear_attention_reads_the_slots_of_its_regimes_and_no_score_is_a_close_call() -> None:
    inputs, _ = draw("dla", Shape(1, 500, 2, 64), torch.float32, CPU, seed=0)
    found = cut(inputs, "torch")
    for head in (0, 1):
        first, *others = found.boundary[0, :, head].nonzero()[:, 0].tolist()
        assert first == 0
        assert others == [others[0] + 128 * i for i in range(len(others))]
        assert 372 <= others[-1] < 500
    assert not torch.equal(found.boundary[..., 0], found.boundary[..., 1]), "every head has places of its own"
    score, _ = boundaries(inputs["k"], inputs["v"], THRESHOLD, inputs["log_decay"])
    assert (score[:, 1:] - THRESHOLD).abs().min() > 0.05


def test_peers_that_are_not_here_say_why() -> None:
    found = [peer for op in ARGUMENTS for peer in peers.peers(op, CPU)]
    assert [peer.name for peer in found] == [
        "torch SDPA flash",
        "torch SDPA cuDNN",
        "fla chunk_simple_gla",
        "fla chunk_gated_delta_rule",
        "fla chunk_log_linear_attn",
    ]
    assert all(peer.call is None and peer.note for peer in found[1:])


def test_fla_is_called_as_its_signatures_want_and_its_refusal_is_lifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins that have fla's names, arguments and defaults, and compute what fla's own references do."""

    def simple_gla(q: Any, k: Any, v: Any, g: Any = None, g_gamma: Any = None, scale: Any = None) -> Any:
        return reference("linear_attention", q=q, k=k, v=v, log_decay=g, scale=scale)

    def gated_delta(q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any = None) -> Any:
        return reference("gated_delta_rule", q=q, k=k, v=v, beta=beta, log_decay=g, scale=scale)

    def log_linear(q: Any, k: Any, v: Any, g: Any, level_scales: Any, scale: float | None = 1.0) -> Any:
        return reference("log_linear_attention", q=q, k=k, v=v, level_scale=level_scales, log_decay=g, scale=scale)

    def reference(op: str, **arguments: Any) -> Any:
        return getattr(importlib.import_module(f"mixassay.kernels.{op}"), op)(**arguments, backend="reference")

    stubs: dict[str, dict[str, Any]] = {
        "fla": {"__spec__": ModuleSpec("fla", None)},
        "fla.ops.simple_gla": {"chunk_simple_gla": simple_gla},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": gated_delta},
        "fla.ops.log_linear_attn": {"chunk_log_linear_attn": log_linear},
        "fla.ops.common.chunk_o": {
            "IS_NVIDIA_HOPPER": True,
            "TRITON_ABOVE_3_4_0": True,
            "TRITON_ABOVE_3_7_1": False,
        },
    }
    for name, contents in stubs.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.6.0")
    peers._lift_guard.cache_clear()
    for op in peers.FLA_CALLS:
        (peer,) = peers.peers(op, torch.device("cuda"))
        assert peer.version == "0.6.0"
        assert peer.note == "fla's refusal of gated backwards with this Triton on Hopper was lifted"
        sample = bench_kernels.few_tokens(op, 8, Setting(CPU, dtype=torch.float32, **TINY))
        errors = bench_kernels.check(peer, "forward_backward", sample)
        assert isinstance(errors, dict), errors
        assert all(e is not None and e < 1e-5 for e in errors.values())
    peers._lift_guard.cache_clear()
    assert sys.modules["fla.ops.common.chunk_o"].TRITON_ABOVE_3_7_1


def test_on_cuda_the_cache_is_overwritten_and_the_device_held_before_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for the device: what is done, in which order, and that events are read after the last run."""
    done: list[str] = []
    held: list[int] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("event")

        def elapsed_time(self, end: "Event") -> float:
            assert done[-1] == "synchronize"
            return 2.0

    class Flush:
        def zero_(self) -> None:
            done.append("flush")

    clock = timing.Clock(CPU, budget=1)
    monkeypatch.setattr(clock, "_flush", Flush())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: done.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: held.append(cycles) or done.append("hold"))
    monkeypatch.setattr(timing, "SHORTEST_HOLD", 1.0)
    once = ["synchronize", "flush", "hold", "event", "run", "event", "synchronize"]
    assert clock.samples(lambda: done.append("run"), 2) == [2.0, 2.0]
    assert done == once * 2

    slow = itertools.count(step=0.004)  # seconds that pass between two looks at the clock
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(slow))
    monkeypatch.setattr(timing, "SHORTEST_HOLD", 0.001)
    held.clear()
    assert clock.samples(lambda: None, 2) == [2.0, 2.0]
    assert held == [n * timing.CYCLES for n in (0.001, 0.002, 0.004, 0.004)]  # launched too late: timed again


def test_what_a_caller_waits_ends_when_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    clock = timing.Clock(torch.device("cuda"), budget=1, launches=True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: done.append("synchronize"))
    (ms,) = clock.samples(lambda: done.append("run"), 1)
    assert ms >= 0
    assert done == ["synchronize", "run", "synchronize"]


def test_runs_take_turns_and_one_that_fails_stops_none() -> None:
    done: list[str] = []

    def fails() -> None:
        raise ValueError("no")

    times = timing.Clock(CPU, budget=0).compare(
        {"a": lambda: done.append("a"), "b": lambda: done.append("b"), 3: fails}
    )
    assert done == ["a"] * 2 + ["b"] * 2 + ["a", "b"] * timing.ROUNDS
    assert times[3] == timing.Failure("error", "ValueError: no")
    assert [len(times[name]) for name in "ab"] == [timing.ROUNDS] * 2


def test_summary() -> None:
    assert timing.summary([3.0, 1.0, 2.0, 5.0, 4.0, 100.0]) == {
        "ms": 3.5, "ms_min": 1.0, "ms_p20": 2.0, "ms_p80": 5.0, "n": 6,
    }  # fmt: skip


def test_a_torn_line_costs_one_record(tmp_path: Path) -> None:
    path = tmp_path / "new/x.jsonl"
    bench_records.append(path, {"bench": "kernels", "schema": 1, "n": 1})
    with open(path, "a") as file:
        file.write('{"bench": "kern')  # killed in the middle
    bench_records.append(path, {"bench": "kernels", "schema": 1, "n": 2})
    records, warnings = bench_records.read(path)
    assert [record["n"] for record in records] == [1, 2]
    assert warnings == [f"{path}:2: no record of a benchmark, skipped"]


def test_a_newer_schema_is_not_guessed_at(tmp_path: Path) -> None:
    bench_records.append(tmp_path / "x.jsonl", {"bench": "kernels", "schema": 99})
    with pytest.raises(UserError, match="newer mixassay"):
        bench_records.read(tmp_path / "x.jsonl")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_there_are_floors_and_memory() -> None:
    setting = Setting(torch.device("cuda"), ops=("linear_attention", "softmax_attention"), **bench_kernels.QUICK)
    mine = [record for record in bench_kernels.bench_kernels(setting) if record["ours"]]
    assert [record["implementation"] for record in mine] == ["mixassay triton"] * 2 + ["mixassay torch"] * 2
    for record in mine:
        for which in PASSES:
            assert record[which]["status"] == "ok", record[which]["reason"]
            assert 0 < record[which]["fraction_of_floor"] < 1
            assert record[which]["peak_bytes"] > 0
