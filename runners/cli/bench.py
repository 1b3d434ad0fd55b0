"""`mixassay bench`: speed of data, operators, decoding and training."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from mixassay.errors import UserError
from mixassay.registry import suggest
from mixassay.runners import bench_records, bench_report, render
from mixassay.runners.bench_records import PASSES, Record
from mixassay.runners.cli import RESULTS, AsJson, app

bench = typer.Typer(help="Measure speed.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench, name="bench")

T = TypeVar("T")
Device = Annotated[str | None, typer.Option("--device", metavar="DEVICE", help="cpu or cuda; cuda where there is one.")]
Lengths = Annotated[str | None, typer.Option("--length", metavar="T,...", help="Lengths: 2K,32K.")]
Quick = Annotated[bool, typer.Option("--quick", help="Tiny sizes, seconds on a laptop: does it work here?")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", help="Append the records to this file, as JSON lines. [results/BENCH/DEVICE.jsonl]"
    ),
]


@bench.command()
def data(
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="cpu or cuda.")] = "cpu",
    rows: Annotated[int, typer.Option(min=1, help="Rows that ours draws.")] = 100_000,
    loop_rows: Annotated[int, typer.Option(min=1, help="Rows that the loop draws.")] = 1_000,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Append the record to this file, as JSON.")] = None,
) -> None:
    """Time data generation against a plain NumPy loop, and print the ratio."""
    from mixassay.runners.bench_data import bench_data

    record = bench_data(device, rows, loop_rows)
    if out is not None:
        bench_records.append(out, record)


@bench.command()
def kernels(
    op: Annotated[str | None, typer.Option("--op", metavar="NAME,...", help="These operators only.")] = None,
    length: Lengths = None,
    dim: Annotated[str | None, typer.Option("--dim", metavar="D,...", help="Widths of a head. [64,128]")] = None,
    heads: Annotated[int | None, typer.Option("--heads", min=1, help="Heads. [1024 / D]", show_default=False)] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="DTYPE", help="bfloat16, float16 or float32. [float32 on cpu]")
    ] = None,
    device: Device = None,
    quick: Quick = False,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Also other implementations of the same.")] = True,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time the operators, forward and with gradients, next to their peers in the same process.

    65,536 tokens in all, in sequences of 2K to 128K. Outputs and gradients are checked against float64 before anything
    is timed. Peers: PyTorch's flash and cuDNN attention, and flash-linear-attention where installed.

    Exit code: 0 all of ours were right and timed; 2 a mistake in the command; 3 something of ours was not.
    """
    from mixassay.runners import bench_kernels
    from mixassay.runners.operators import ARGUMENTS

    where = device_of(device)
    dtypes = {str(known).removeprefix("torch."): known for known in bench_kernels.LIMITS}
    chosen: dict[str, Any] = dict(bench_kernels.QUICK) if quick else {} if where.type == "cuda" else bench_kernels.CPU
    chosen["device"], chosen["with_peers"] = where, peers
    name = dtype or ("bfloat16" if where.type == "cuda" else "float32")
    chosen["dtype"] = dtypes[one_of("--dtype", name, list(dtypes))]
    if op is not None:
        chosen["ops"] = tuple(one_of("--op", name, list(ARGUMENTS)) for name in op.split(","))
    if length is not None:
        chosen["lengths"] = numbers("--length", length)
    if dim is not None or heads is not None:
        widths = numbers("--dim", dim) if dim is not None else bench_kernels.Setting(**chosen).heads
        chosen["heads"] = {D: heads or max(1, 1024 // D) for D in widths}
    finish(
        bench_kernels.bench_kernels(bench_kernels.Setting(**chosen)),
        out or default_file("kernels", where, quick),
        as_json,
        kernel_line,
        bench_kernels.failed,
    )


@bench.command()
def decode(
    mixer: Annotated[str | None, typer.Option("--mixer", metavar="NAME,...", help="These mixers only.")] = None,
    length: Lengths = None,
    d_model: Annotated[int | None, typer.Option("--d-model", min=1, help="Width. [1024]", show_default=False)] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences decoded together.")] = 1,
    device: Device = None,
    quick: Quick = False,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time one more token after T tokens for every mixer, and count the bytes of its state.

    Exit code: 0 all were right and timed; 2 a mistake in the command; 3 some were not.
    """
    from mixassay.mixers import mixer as registry
    from mixassay.runners import bench_decode

    where = device_of(device)
    names = [one_of("--mixer", name, registry.names()) for name in mixer.split(",")] if mixer else registry.names()
    chosen: dict[str, Any] = dict(bench_decode.QUICK) if quick else {}
    chosen |= {"device": where, "mixers": tuple(names), "batch": batch}
    if length is not None:
        chosen["lengths"] = numbers("--length", length)
    if d_model is not None:
        chosen["d_model"] = d_model
    finish(
        bench_decode.bench_decode(bench_decode.Setting(**chosen)),
        out or default_file("decode", where, quick),
        as_json,
        decode_line,
        lambda record: record["status"] != "ok",
    )


@bench.command()
def train(
    mixer: Annotated[str | None, typer.Option("--mixer", metavar="NAME,...", help="These mixers only.")] = None,
    d_model: Annotated[str | None, typer.Option("--d-model", metavar="D,...", help="Widths. [16,32,64]")] = None,
    pairs: Annotated[str | None, typer.Option("--pairs", metavar="N,...", help="Pairs in 256 tokens. [4,64]")] = None,
    stack: Annotated[str | None, typer.Option("--stack", metavar="M,...", help="Models in one. [1,5,20,40]")] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", metavar="NAME", help="bf16, fp16, tf32 or fp32. [bf16; fp32 on cpu]")
    ] = None,
    baseline: Annotated[bool, typer.Option("--baseline/--no-baseline", help="Also the plain loop.")] = True,
    device: Device = None,
    quick: Quick = False,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time a training step on MQAR, per model of a stack, beside a plain loop over the same model.

    256 rows of 256 tokens, a vocabulary of 8192, two layers. The losses are checked before anything is timed.

    Exit code: 0 all were right and timed; 2 a mistake in the command; 3 some were not.
    """
    from mixassay.mixers import mixer as registry
    from mixassay.runners import bench_train
    from mixassay.runners.tolerance import LIMITS

    where = device_of(device)
    names = [one_of("--mixer", name, registry.names()) for name in mixer.split(",")] if mixer else registry.names()
    chosen: dict[str, Any] = dict(bench_train.QUICK) if quick else {}
    chosen |= {"device": where, "mixers": tuple(names), "baseline": baseline}
    name = precision or ("bf16" if where.type == "cuda" else "fp32")
    chosen["precision"] = one_of("--precision", name, list(LIMITS))
    given = {"widths": ("--d-model", d_model), "pairs": ("--pairs", pairs), "stacks": ("--stack", stack)}
    chosen |= {key: numbers(option, text) for key, (option, text) in given.items() if text is not None}
    finish(
        bench_train.bench_train(bench_train.Setting(**chosen)),
        out or default_file("train", where, quick),
        as_json,
        train_line,
        bench_train.failed,
    )


def finish(
    records: Iterable[Record], out: Path, as_json: bool, line: Callable[[Record], str], failed: Callable[[Record], bool]
) -> None:
    """Keep and show each record as it comes, then the tables; exit 3 if any of ours failed."""
    console, kept = Console(stderr=as_json), []
    for record in records:
        bench_records.append(out, record)
        kept.append(record)
        if as_json:
            print(json.dumps(record), flush=True)
        console.print(
            line(record), style="red" if failed(record) else "", markup=False, highlight=False, soft_wrap=True
        )
    if not as_json:
        for grid in bench_report.tables(kept):
            console.print(render.rich(grid, console.width))
    console.print(f"{len(kept)} records appended to {out}", highlight=False, soft_wrap=True)
    raise typer.Exit(3 if any(map(failed, kept)) else 0)


def kernel_line(record: Record) -> str:
    def told(which: str) -> str:
        found = record[which]
        text = f"{bench_report.number(found['ms'])} ms" if "ms" in found else ""
        if found.get("fraction_of_floor"):
            text += f" ({bench_report.percent(found['fraction_of_floor'])})"
        return text if found["status"] == "ok" else f"{text} {found['status']}: {found['reason']}".strip()

    each = {which: told(which) for which in PASSES}
    times = [f"{bench_report.TITLES[which]} {text}" for which, text in each.items()]
    alike = len(set(each.values())) == 1
    place = f"{record['op']} D={record['D']} T={record['T']:,}, {record['implementation']}"
    return f"{place}: {each[PASSES[0]] if alike else '; '.join(times)}"


def decode_line(record: Record) -> str:
    told = f"{record['status']}: {record['reason']}"
    if record["status"] == "ok":
        told = f"{bench_report.number(record['eager']['ms'])} ms, {bench_report.size(record['state_bytes'])}"
    return f"{record['mixer']} T={record['T']:,}: {told}"


def train_line(record: Record) -> str:
    def told(part: Record) -> str:
        ok = part["status"] == "ok"
        return f"{bench_report.number(part['ms'])} ms" if ok else f"{part['status']}: {part['reason']}"

    parts = {f"stack of {count}": part for count, part in bench_report.stacks_of(record).items()}
    parts |= {"plain loop": record["step"]} if "step" in record else {}
    times = "; ".join(f"{name} {told(part)}" for name, part in parts.items())
    return f"{record['mixer']} d_model={record['d_model']} pairs={record['pairs']}: {times}"


# -- what is typed -----------------------------------------------------------------------------------------------------


def device_of(text: str | None) -> Any:
    """A torch.device; without a wish, CUDA where it is to be had."""
    import torch

    if text is not None and not re.fullmatch(r"cpu|cuda(:[0-9]+)?", text):
        raise UserError(f"--device should be cpu, cuda or cuda:N, got {text}")
    wanted = torch.device(text or ("cuda" if torch.cuda.is_available() else "cpu"))
    if wanted.type == "cuda" and not (wanted.index or 0) < torch.cuda.device_count():
        raise UserError(
            f'device "{text}" was asked for, but this PyTorch sees {torch.cuda.device_count()} CUDA devices'
        )
    return wanted


def one_of(option: str, name: str, known: Sequence[str]) -> str:
    if name not in known:
        raise UserError(f'{option}: unknown "{name}".{suggest(name, list(known))}')
    return name


def numbers(option: str, text: str) -> tuple[int, ...]:
    """`2K,32K`"""
    words = [re.fullmatch(r"([1-9][0-9]*)(K?)", word.strip(), re.IGNORECASE) for word in text.split(",")]
    if None in words:
        raise UserError(f"{option} should be numbers such as 2K,32K, got {text}")
    return tuple(int(word[1]) * (1024 if word[2] else 1) for word in words if word)


def default_file(bench: str, device: Any, quick: bool) -> Path:
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return RESULTS / bench / f"{slug}{'-quick' if quick else ''}.jsonl"
