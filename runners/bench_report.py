"""Records of benchmarks as tables, and in long form for programs. Nothing here imports torch.

Of several records of one thing (operator, implementation, shape, device), the newest stands in the table.
"""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mixassay.runners.bench_records import PASSES, Record
from mixassay.runners.render import Cell, Grid

TITLES = {"forward": "forward", "forward_backward": "forward + backward"}


def tables(records: Sequence[Record], warnings: Sequence[str] = ()) -> list[Grid]:
    """The tables of all records, kind after kind and device after device."""
    grids = [
        *(grid for group in groups(records, "kernels", shape_of) for grid in _kernels(group)),
        *(grid for group in groups(records, "decode", setting_of) for grid in _decode(group)),
        *(grid for group in groups(records, "train", training_of) for grid in _train(group)),
        *(_data(group) for group in groups(records, "data", device_of)),
    ]
    return [Grid(g.title, g.heads, g.rows, g.left, g.bold, g.caption, tuple(warnings)) for g in grids]


def groups(records: Iterable[Record], bench: str, key: Callable[[Record], Any]) -> Iterator[list[Record]]:
    """The newest records of a benchmark, those alike by `key` together, in the order in which they were measured."""
    found: dict[Any, dict[Any, Record]] = {}
    for record in records:
        if record["bench"] == bench:
            found.setdefault(key(record), {})[identity(record)] = record
    for group in found.values():
        yield list(group.values())


def identity(record: Record) -> Any:
    """What a record is about; a later one about the same replaces it."""
    names = "op implementation mixer B T H D d_model dtype rows loop_rows pairs precision"
    part = (*stacks_of(record), _code(record["code"])) if record["bench"] == "train" else ()
    return (device_of(record), *(record.get(name) for name in names.split()), *part)


def device_of(record: Record) -> Any:
    return record["env"]["class"], record["env"]["cpu"]


def shape_of(record: Record) -> Any:
    return *device_of(record), record["dtype"], record["D"], record["H"]


def training_of(record: Record) -> Any:
    return *device_of(record), record["pairs"], record["T"], record["B"]


def setting_of(record: Record) -> Any:
    return *device_of(record), record["d_model"], record["B"]


# -- kernels -----------------------------------------------------------------------------------------------------------


def _kernels(group: Sequence[Record]) -> Iterator[Grid]:
    """One table a pass: operators and implementations down, T across."""
    first = group[0]
    lengths = sorted({record["T"] for record in group})
    at = {(record["op"], record["implementation"], record["T"]): record for record in group}
    rows = list(dict.fromkeys((op, implementation) for op, implementation, _ in at))
    batch = {record["T"]: record["B"] for record in group}
    shape = f"D={first['D']}, H={first['H']}, {first['dtype']}, {where(first)}"
    for which in PASSES:
        shown = [row for row in rows if any("ms" in at[*row, T][which] for T in lengths if (*row, T) in at)]
        shown += [row for row in rows if row not in shown and any(at[k]["ours"] for k in at if k[:2] == row)]
        yield Grid(
            title=f"Milliseconds, {TITLES[which]}: {shape}",
            heads=(("operator",), ("implementation",), *((f"T={T:,}", f"B={batch[T]}") for T in lengths)),
            rows=tuple((*map(Cell, row), *(_time(at.get((*row, T)), which) for T in lengths)) for row in shown),
            left=2,
            bold=frozenset(),
            caption=tuple(_notes(group, which, [row for row in rows if row not in shown])),
            warnings=(),
        )


def _time(record: Record | None, which: str) -> Cell:
    """Milliseconds, then the share of the floor and the memory; or how it ended."""
    if record is None:
        return Cell("")
    found = record[which]
    if "ms" not in found:
        return Cell(found["status"])
    parts = [percent(found["fraction_of_floor"])] if found["fraction_of_floor"] is not None else []
    parts += [f"wrong: {found['reason'].split(': ', 1)[-1]}"] if found["status"] == "wrong" else []
    memory = found["peak_bytes"]
    mark = f"({', '.join(parts)})" if parts else ""
    return Cell(number(found["ms"]), mark, (size(memory),) if memory is not None else ())


def _notes(group: Sequence[Record], which: str, absent: Sequence[tuple[str, str]]) -> Iterator[str]:
    first = group[0]
    yield "Median time of B sequences of T tokens; every implementation on the same inputs in one process, in turns."
    rates = first["rates"]
    if rates:
        yield (
            "Per cent: the floor as a share of the time. The floor is the larger of bytes (inputs read once, results"
            f" written once) at {rates['bytes_per_s'] / 1e12:.2f} TB/s and products of the chunkwise form at "
            f"{rates['flops_per_s'] / 1e12:.0f} TFLOP/s, both measured in the same process."
        )
    if any(record[which].get("peak_bytes") is not None for record in group):
        yield "Below: peak memory beyond the inputs."
    launches: dict[str, list[float]] = {}
    for record in group:
        if (record[which].get("launch_ms") or 0) > record[which].get("ms", 0):
            name = f"{record['op']}, {record['implementation']}"
            launches.setdefault(name, []).append(record[which]["launch_ms"])
    if launches:
        said = "; ".join(f"{name} {' to '.join(spread(ms))}" for name, ms in launches.items())
        yield f"The device's time. The CPU launches these more slowly, unless a CUDA graph does it, in ms: {said}."
    worst: dict[str, float] = {}
    for record in group:
        for errors in filter(None, record[which]["errors"].values()):
            if "ms" in record[which] and record[which]["status"] == "ok":
                name = record["implementation"].split(" ")[0]
                worst[name] = max(worst.get(name, 0.0), *(e for e in errors.values() if e is not None))
    if worst:
        shown = ", ".join(f"{name} {error:.1e}" for name, error in worst.items())
        yield f"Checked against float64 before timing; limit {first['limit']:g} relative, worst that passed: {shown}."
    for record in group:
        if record["ours"] and record["unchecked"]:
            few = f"checked on {record['checked']} tokens only"
            yield f"{record['op']} at T={record['T']:,}: {few} ({record['unchecked']})."
    for op, implementation in absent:
        yield f"Not in the table: {implementation} ({op}): {_reason(group, op, implementation, which)}."
    for record in group:
        if record["ours"] and record[which]["status"] != "ok":
            yield f"{record['implementation']} ({record['op']}) at T={record['T']:,}: {record[which]['reason']}."
    if first["env"]["device"] != "cpu":  # where everybody knows why it is not Triton
        yield from dict.fromkeys(f"{r['implementation']}: {r['note']}" for r in group if r["note"])
    yield from _origin(group)


def _reason(group: Sequence[Record], op: str, implementation: str, which: str) -> str:
    alike = (r for r in group if (r["op"], r["implementation"]) == (op, implementation))
    return str(next(alike)[which]["reason"])


# -- decode and data ---------------------------------------------------------------------------------------------------


def _decode(group: Sequence[Record]) -> Iterator[Grid]:
    first = group[0]
    lengths = sorted({record["T"] for record in group})
    at = {(record["mixer"], record["T"]): record for record in group}
    mixers = list(dict.fromkeys(record["mixer"] for record in group))
    setting = f"d_model={first['d_model']}, batch {first['B']}, float32, {where(first)}"
    origin = tuple(_origin(group))
    times = "Median of the mixer's step alone, launches included"
    graph = any((record.get("cuda_graph") or {}).get("status") == "ok" for record in group)
    for title, cell, note in (
        ("Milliseconds for one more token after T", _step, times + ("; below, as a CUDA graph." if graph else ".")),
        ("State after T tokens", _state, "Of one sequence; live: without slots that hold nothing at that T."),
    ):
        yield Grid(
            title=f"{title}: {setting}",
            heads=(("mixer",), *((f"T={T:,}",) for T in lengths)),
            rows=tuple((Cell(m), *(cell(at[m, T]) if (m, T) in at else Cell("") for T in lengths)) for m in mixers),
            left=1,
            bold=frozenset(),
            caption=(note, *origin),
            warnings=(),
        )


def _step(record: Record) -> Cell:
    if record["status"] != "ok":
        return Cell(record["status"])
    graph = record["cuda_graph"]
    return Cell(number(record["eager"]["ms"]), small=(number(graph["ms"]),) if graph["status"] == "ok" else ())


def _state(record: Record) -> Cell:
    if record["status"] != "ok":
        return Cell(record["status"])
    kept, live = record["state_bytes"], record["live_state_bytes"]
    return Cell(size(kept), f"(live {size(live)})" if live != kept else "")


def _train(group: Sequence[Record]) -> Iterator[Grid]:
    """One table a precision: mixers and widths down, the plain loop and stacks across, each the newest of its kind."""
    first, group = group[0], sorted(group, key=lambda record: record["time"])
    loops: dict[Any, Record] = {}
    for record in group:
        if not record["ours"]:
            about = record["mixer"], record["d_model"]
            loops[about] = loops[*about, _code(record["code"])] = record["step"]
    for precision in dict.fromkeys(record["precision"] for record in group if record["ours"]):
        ours = [record for record in group if record["ours"] and record["precision"] == precision]
        mixers = list(dict.fromkeys(record["mixer"] for record in ours))
        rows: dict[Any, dict[int, Record]] = {}
        for record in sorted(ours, key=lambda record: (mixers.index(record["mixer"]), record["d_model"])):
            about = record["mixer"], record["d_model"]
            for count, part in stacks_of(record).items():
                rows.setdefault(about, {})[count] = {**part, "loop": loops.get((*about, _code(record["code"])))}
        counts = sorted({count for parts in rows.values() for count in parts})
        yield Grid(
            title=(
                f"Milliseconds of a training step per model: {first['pairs']} pairs, T={first['T']}, batch "
                f"{first['B']}, vocabulary {first['vocab_size']:,}, {precision}, {where(first)}"
            ),
            heads=(("mixer",), ("d_model",), ("plain loop",), *((f"stack of {count}",) for count in counts)),
            rows=tuple(
                (
                    Cell(mixer),
                    Cell(str(width)),
                    _step_of(loops.get((mixer, width))),
                    *(_step_of(parts.get(n)) for n in counts),
                )
                for (mixer, width), parts in rows.items()
            ),
            left=1,
            bold=frozenset(),
            caption=(
                "Median of whole steps, launches included: rows drawn, gradients, update. With it how many times "
                "faster than the plain loop by the same code: one model in float32, eagerly, with logits at all "
                "positions, on a batch that is there already.",
                *_origin(ours),
            ),
            warnings=(),
        )


def stacks_of(record: Record) -> dict[int, Record]:
    return {int(name.removeprefix("stack ")): part for name, part in record.items() if name.startswith("stack ")}


def _step_of(found: Record | None) -> Cell:
    """Milliseconds, then the ratio to its `loop`, if it has one; or how it ended."""
    if found is None:
        return Cell("")
    if found["status"] != "ok":
        return Cell(found["status"])
    loop = found.get("loop") or {"status": "none"}
    return Cell(number(found["ms"]), f"({loop['ms'] / found['ms']:.3g})" if loop["status"] == "ok" else "")


def _data(group: Sequence[Record]) -> Grid:
    rows = [("mixassay", r["rows_per_s"], r["ratio"]) for r in group[-1:]]
    rows = [("NumPy loop", group[-1]["loop_rows_per_s"], 1.0), *rows]
    return Grid(
        title=f"Rows of MQAR a second: {where(group[-1])}",
        heads=(("generator",), ("rows/s",), ("ratio",)),
        rows=tuple((Cell(name), Cell(f"{speed:,.0f}"), Cell(f"{ratio:,.0f}")) for name, speed, ratio in rows),
        left=1,
        bold=frozenset(),
        caption=(f"{group[-1]['env']['threads']} CPU thread(s).",),
        warnings=(),
    )


# -- words -------------------------------------------------------------------------------------------------------------


def where(record: Record) -> str:
    env = record["env"]
    return str(env["cpu"] if env["device"] == "cpu" else env["device"])


def _origin(group: Sequence[Record]) -> Iterator[str]:
    env = group[-1]["env"]
    versions = [f"{name} {env[name]}" for name in ("torch", "triton") if env.get(name)]
    others = dict.fromkeys(f"{r['implementation']} {r['version']}" for r in group if r.get("version"))
    codes = sorted({_code(record["code"]) for record in group})
    yield f"{', '.join([*versions, *others])}. Code {', '.join(codes)}."


def _code(code: Record) -> str:
    if code["commit"] == "none":
        return f"release {code['version']}, source {code['source']}"
    return str(code["commit"])[:12] + ("-dirty" if code["dirty"] else "")


def number(ms: float) -> str:
    """Three digits."""
    return f"{ms:.3g}" if ms < 100 else f"{ms:,.0f}"


def spread(times: Sequence[float]) -> list[str]:
    """The least and the greatest, once if they read alike."""
    return list(dict.fromkeys(number(ms) for ms in (min(times), max(times))))


def percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def size(n: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.3g} {unit}" if n < 1000 else f"{n:.0f} {unit}"
        n /= 1024
    return f"{n:.3g} GiB"


# -- for programs ------------------------------------------------------------------------------------------------------


def long_form(records: Iterable[Record]) -> list[Record]:
    """One flat mapping for each record, or for each pass of a kernel's."""
    rows: list[Record] = []
    for record in records:
        if record["bench"] == "kernels":
            shared = {name: x for name, x in record.items() if name not in PASSES}
            rows += [_flat({**shared, "pass": which, **record[which]}) for which in PASSES]
        else:
            rows.append(_flat(record))
    return rows


def _flat(record: Record, before: str = "") -> Record:
    """`{"env": {"torch": x}}` as `{"env.torch": x}`."""
    flat: Record = {}
    for name, value in record.items():
        flat |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {before + name: value}
    return flat


def to_json(records: Iterable[Record]) -> str:
    return json.dumps(long_form(records), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def to_csv(records: Iterable[Record]) -> str:
    rows, out = long_form(records), io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
