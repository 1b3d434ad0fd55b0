"""Records of benchmarks as tables, long form and picture, and the command line around them."""

import csv
import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from mixassay.runners import bench_kernels, bench_plot, bench_report, render
from mixassay.runners.operators import Call, operator

ENV = {"class": "GPU X, torch 2.11", "device": "GPU X", "cpu": "CPU Y", "torch": "2.11.0", "triton": "3.6.0"}
CODE = {"commit": "c" * 40, "dirty": False, "patch": None, "source": "s" * 16, "version": "0.1.0"}


def kernel(op: str = "linear_attention", T: int = 2048, ms: float = 0.25, **more: Any) -> dict[str, Any]:
    def one_pass(ms: float) -> dict[str, Any]:
        return {
            "status": "ok",
            "reason": None,
            "errors": {"short": {"o": 1e-3}, "timed": {"o": 2e-3}},
            **{name: ms for name in ("ms", "ms_min", "ms_p20", "ms_p80")},
            "n": 9,
            "tokens_per_s": 1e3 * 65536 / ms,
            "floor_ms": 0.1,
            "fraction_of_floor": 0.1 / ms,
            "peak_bytes": 3 * 2**28,
        }

    return {
        "bench": "kernels",
        "schema": 1,
        "op": op,
        "implementation": "mixassay triton",
        "ours": True,
        "version": None,
        "note": None,
        **{"B": max(1, 65536 // T), "T": T, "H": 16, "D": 64, "dtype": "bfloat16", "limit": 0.02},
        **{"checked": 601, "unchecked": None},
        "forward": one_pass(ms),
        "forward_backward": one_pass(4 * ms),
        "rates": {"bytes_per_s": 4.3e12, "flops_per_s": 7.9e14},
        "code": CODE,
        "env": ENV,
        **more,
    }


def peer(status: str = "ok", reason: str | None = None, timed: bool = True, **more: Any) -> dict[str, Any]:
    record = kernel(**more) | {"implementation": "a peer", "ours": False, "version": "1.2"}
    for which in ("forward", "forward_backward"):
        record[which] |= {"status": status, "reason": reason}
        if not timed:
            record[which] = {name: record[which][name] for name in ("status", "reason", "errors")}
    return record


def decoded(mixer: str, T: int, ms: float, kept: int, live: int | None = None) -> dict[str, Any]:
    return {
        "bench": "decode",
        "schema": 1,
        "mixer": mixer,
        **{"B": 1, "T": T, "d_model": 1024, "status": "ok", "reason": None},
        **{"eager": {"status": "ok", "ms": ms}, "cuda_graph": {"status": "ok", "ms": ms / 4}},
        **{"state_bytes": kept, "live_state_bytes": kept if live is None else live},
        "code": CODE,
        "env": ENV,
    }


def markdown(*records: dict[str, Any]) -> list[str]:
    return [render.markdown(grid) for grid in bench_report.tables(records)]


def test_a_table_for_each_pass_with_times_floors_and_memory() -> None:
    forward, both = markdown(kernel(), kernel(T=4096, ms=0.5), peer(ms=0.4))
    assert forward.splitlines()[0] == "**Milliseconds, forward: D=64, H=16, bfloat16, GPU X**"
    assert "| operator | implementation | T=2,048 B=32 | T=4,096 B=16 |" in forward
    assert "| linear_attention | mixassay triton | 0.25 (40 %)<br>768 MiB | 0.5 (20 %)<br>768 MiB |" in forward
    assert "| linear_attention | a peer | 0.4 (25 %)<br>768 MiB |  |" in forward
    assert "| linear_attention | mixassay triton | 1 (10 %)<br>768 MiB | 2 (5 %)<br>768 MiB |" in both
    assert "at 4.30 TB/s" in forward
    assert "at 790 TFLOP/s" in forward
    assert "limit 0.02 relative, worst that passed: mixassay 2.0e-03, a 2.0e-03" in forward
    assert "torch 2.11.0, triton 3.6.0, a peer 1.2. Code cccccccccccc." in forward


def test_what_is_wrong_or_missing_is_said() -> None:
    forward, _ = markdown(
        kernel(), peer("wrong", "relative error above 0.02: dk 5.4e-01"), peer("oom", "none left", timed=False, T=4096)
    )
    assert "0.25 (40 %, wrong: dk 5.4e-01)" in forward
    assert "| oom |" in forward
    forward, _ = markdown(kernel(), peer("unsupported", "a peer is not installed", timed=False))
    assert "| a peer |" not in forward
    assert "- Not in the table: a peer (linear_attention): a peer is not installed." in forward
    broken = peer("wrong", "relative error above 0.02: o 1.0e-01", timed=False) | {"ours": True, "implementation": "us"}
    forward, _ = markdown(broken)
    assert "| linear_attention | us | wrong |" in forward
    assert "- us (linear_attention) at T=2,048: relative error above 0.02: o 1.0e-01." in forward


def test_what_was_checked_on_few_tokens_only_is_said() -> None:
    forward, _ = markdown(kernel(unchecked="none left"))
    assert "- linear_attention at T=2,048: checked on 601 tokens only (none left)." in forward


def test_launches_that_take_longer_than_the_device_are_said_over_all_lengths() -> None:
    def launched(T: int, ms: float, launch: float, op: str = "hla2") -> dict[str, Any]:
        record = kernel(op=op, T=T, ms=ms)
        record["forward"]["launch_ms"] = launch
        return record

    found = [launched(2048, 0.3, 1.3), launched(8192, 0.4, 0.8), launched(32768, 2.0, 1.9), launched(2048, 1, 3, "dla")]
    (forward, _) = bench_report.tables(found)
    (said,) = [line for line in forward.caption if "launches" in line]
    assert said.endswith("in ms: hla2, mixassay triton 0.8 to 1.3; dla, mixassay triton 3.")


def test_the_newest_record_stands_and_devices_are_kept_apart() -> None:
    elsewhere = kernel(ms=9.0) | {"env": {**ENV, "class": "GPU Z, torch 2.11", "device": "GPU Z"}}
    tables = markdown(kernel(ms=0.25), elsewhere, kernel(ms=0.75))
    assert [table.splitlines()[0].split(", ")[-1] for table in tables] == ["GPU X**"] * 2 + ["GPU Z**"] * 2
    assert "0.75 (13 %)" in tables[0]
    assert "0.25" not in tables[0]


def test_a_copy_without_git_names_its_source() -> None:
    assert "Code release 0.1.0, source ssssssssssssssss." in markdown(kernel() | {"code": CODE | {"commit": "none"}})[0]


def test_decode_and_data_have_tables() -> None:
    times, states = markdown(
        decoded("attention", 1024, 0.5, 2**23), decoded("log_linear_mamba2", 1024, 0.25, 2**20, live=2**18)
    )
    assert "| attention | 0.5<br>0.125 |" in times
    assert "| log_linear_mamba2 | 1 MiB (live 256 KiB) |" in states
    data = {"bench": "data", "rows_per_s": 7e6, "loop_rows_per_s": 2e3, "ratio": 3500.0, "env": ENV | {"threads": 16}}
    (table,) = markdown(data)
    assert "| mixassay | 7,000,000 | 3,500 |" in table


def test_the_repositorys_records_can_be_read(place: Any) -> None:
    said = place.run("report", str(Path(__file__).parents[2] / "results/bench/data.jsonl"), "--format", "md")
    assert said.code == 0, said.err
    assert "| NumPy loop |" in said.out


def test_long_form_has_a_row_for_each_pass() -> None:
    rows = list(csv.DictReader(io.StringIO(bench_report.to_csv([kernel(), peer("oom", "none left", timed=False)]))))
    assert [(row["implementation"], row["pass"], row["ms"]) for row in rows] == [
        ("mixassay triton", "forward", "0.25"),
        ("mixassay triton", "forward_backward", "1.0"),
        ("a peer", "forward", ""),
        ("a peer", "forward_backward", ""),
    ]
    assert rows[0]["errors.timed.o"] == "0.002"
    assert rows[0]["env.device"] == "GPU X"
    assert json.loads(bench_report.to_json([kernel()]))[1]["pass"] == "forward_backward"


# -- the picture -------------------------------------------------------------------------------------------------------


def test_panels_hold_ours_solid_and_peers_dashed_in_one_colour() -> None:
    records = [kernel(), kernel(T=131072, ms=0.5), peer(), kernel("gated_delta_rule"), kernel() | {"D": 128, "H": 8}]
    rows = bench_plot.panels(records)
    assert [[panel.title.rsplit(", ", 3)[1] for panel in row] for row in rows] == [["D=64", "D=128"]] * 3
    ours, theirs, other = rows[0][0].lines
    assert (ours.name, ours.dashed, ours.points) == ("linear_attention", False, ((2048, 0.25), (131072, 0.25)))
    assert (theirs.name, theirs.dashed, theirs.number) == ("a peer", True, ours.number)
    assert other.number != ours.number
    assert rows[0][0].unit == "ms for 65,536 tokens"
    assert rows[2][0].unit == "bytes for 65,536 tokens"
    assert [y for _, y in rows[2][0].lines[0].points] == [3 * 2**28, 3 * 2**27], "of 65,536 tokens and of 131,072"


def test_a_wrong_peer_is_named_so_and_what_has_no_time_is_not_drawn() -> None:
    records = [kernel(), peer("wrong", "relative error above 0.02: dk 1"), kernel("gated_delta_rule")]
    records[2]["forward"] = {"status": "oom", "reason": "none left", "errors": {"short": {}, "timed": {}}}
    assert [line.name for line in bench_plot.panels(records)[0][0].lines] == ["linear_attention", "a peer (wrong)"]


def test_live_states_are_drawn_where_they_differ() -> None:
    records = [decoded("attention", 1024, 0.5, 2**23), decoded("log_linear_mamba2", 1024, 0.25, 2**20, live=2**18)]
    ((times, states),) = bench_plot.panels(records)
    assert [line.name for line in times.lines] == ["attention", "log_linear_mamba2"]
    assert [line.name for line in states.lines] == ["attention", "log_linear_mamba2", "log_linear_mamba2, live"]


def test_names_keep_their_distance_and_their_order() -> None:
    placed = bench_plot.spread([0.1, 0.5, 0.5, 0.51, 0.9], gap=0.1)
    assert min(b - a for a, b in pairwise(placed)) >= 0.1 - 1e-9
    assert placed[0] == pytest.approx(0.1)
    assert placed[-1] == pytest.approx(0.9)


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_picture_is_drawn(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    records = [kernel(T=T, ms=T / 1024, **more) for T in (2048, 131072) for more in ({}, {"op": "softmax_attention"})]
    bench_plot.plot([*records, peer(), decoded("attention", 1024, 0.5, 2**23)], tmp_path / f"x{suffix}")
    drawn = (tmp_path / f"x{suffix}").read_bytes()
    if suffix == ".svg":
        assert b"<svg" in drawn
    else:
        assert drawn.startswith(b"\x89PNG")


# -- the command line --------------------------------------------------------------------------------------------------


def test_a_quick_run_on_a_cpu_and_its_report(place: Any) -> None:
    words = ["bench", "kernels", "--device", "cpu", "--quick", "--op", "linear_attention,softmax_attention"]
    said = place.run(*words, "--length", "64", "--heads", "1")
    assert said.code == 0, said.err
    assert "linear_attention D=64 T=64, mixassay torch: forward" in said.out
    assert "Milliseconds, forward + backward: D=64, H=1, float32" in said.out
    path = place.folder / "results/kernels/cpu-quick.jsonl"
    assert {json.loads(line)["op"] for line in path.read_text().splitlines()} == {
        "linear_attention",
        "softmax_attention",
    }
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    said = place.run("report", str(path), "--format", "md", "--plot", "time.svg")
    assert said.code == 0, said.err
    assert "| softmax_attention | torch SDPA flash |" in said.out
    assert (place.folder / "time.svg").stat().st_size > 0


def test_a_wrong_operator_is_exit_code_3_and_stays_in_the_records(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def replacement(name: str, backend: str) -> Call:
        call = operator(name, backend)
        return (lambda inputs: 1.1 * call(inputs)) if (name, backend) == ("linear_attention", "torch") else call

    monkeypatch.setattr(bench_kernels, "operator", replacement)
    words = ["--quick", "--device", "cpu", "--no-peers", "--length", "32", "--dim", "8", "--json", "--out", "x.jsonl"]
    said = place.run("bench", "kernels", *words, "--op", "linear_attention,gated_delta_rule")
    assert said.code == 3
    first, second = (json.loads(line) for line in said.out.splitlines())
    assert (first["forward"]["status"], second["forward"]["status"]) == ("wrong", "ok")
    assert [json.loads(line) for line in (place.folder / "x.jsonl").read_text().splitlines()] == [first, second]
    said = place.run("report", "x.jsonl", "--format", "md")
    assert "| linear_attention | mixassay torch | wrong |" in said.out


def test_decode_on_the_command_line(place: Any) -> None:
    words = ["--quick", "--device", "cpu", "--mixer", "attention,mamba2", "--length", "8", "--d-model", "16"]
    said = place.run("bench", "decode", *words)
    assert said.code == 0, said.err
    assert "attention T=8: " in said.out
    assert "State after T tokens: d_model=16, batch 1, float32" in said.out
    assert len((place.folder / "results/decode/cpu-quick.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "kernels", "--op", "linear_atention"], 'Did you mean "linear_attention"?'),
        (["bench", "kernels", "--length", "2M"], "--length should be numbers such as 2K,32K, got 2M"),
        (["bench", "kernels", "--dtype", "float8"], "--dtype"),
        (["bench", "kernels", "--device", "tpu"], "--device should be"),
        (["bench", "decode", "--mixer", "atention"], 'Did you mean "attention"?'),
        (["report", "nowhere.jsonl"], "cannot read nowhere.jsonl"),
        (["report", "x.jsonl", "--plot", "x.bmp"], "x.bmp should end in"),
        (["report", "x.jsonl", "--write"], "only --format and --plot apply"),
        (["report", "x.jsonl", "--figure", "state"], "only --format and --plot apply"),
    ],
)
def test_a_mistake_is_one_line(place: Any, words: list[str], message: str) -> None:
    (place.folder / "x.jsonl").write_text(json.dumps(kernel()) + "\n")
    said = place.run(*words)
    assert said.code == 2
    assert message in said.err
    assert "Traceback" not in said.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_no_cuda_where_it_is_asked_for(place: Any) -> None:
    said = place.run("bench", "kernels", "--device", "cuda")
    assert said.code == 2
    assert 'device "cuda" was asked for, but this PyTorch sees 0 CUDA devices' in said.err


def test_files_that_cannot_be_written_are_said(place: Any) -> None:
    (place.folder / "taken").write_text("")
    words = ["--quick", "--device", "cpu", "--mixer", "base_conv", "--length", "8", "--out", "taken/x.jsonl"]
    said = place.run("bench", "decode", *words)
    assert said.code == 2
    assert "cannot write to taken/x.jsonl" in said.err
