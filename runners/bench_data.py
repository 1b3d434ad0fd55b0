"""How fast rows are drawn: ours against a plain NumPy loop over rows, on the same cell in one process.

The loop is what generators of this field look like: one row at a time, `np.random.choice` without replacement for
keys, values and weighted slots. It has the same distribution (the tests compare the two) and always runs on the CPU.
"""

import statistics
import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from mixassay.errors import UserError
from mixassay.provenance import environment
from mixassay.tasks.mqar import MQAR

CELL = MQAR(vocab_size=8192, seq_len=256, num_kv=64)
ROUNDS = 3
Ints = NDArray[np.int64]


def bench_data(device: str = "cpu", rows: int = 100_000, loop_rows: int = 1_000) -> dict[str, Any]:
    """Times `rows` rows of ours on `device` and `loop_rows` of the loop, prints both, returns the record as plain data.

    The two take turns, ROUNDS times, so that a busy machine hurts both; the median counts.
    """
    if rows < 1 or loop_rows < 1:
        raise UserError(f"bench data: needs at least one row each, got {rows} and {loop_rows}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f'bench data: device "{device}" was asked for, but this PyTorch sees no CUDA device')
    index = torch.arange(rows, device=device)
    draw(index)  # tables, memory, kernels
    seconds: dict[str, list[float]] = {"ours": [], "loop": []}
    for at in range(ROUNDS):
        start = time.perf_counter()
        draw(index)
        seconds["ours"].append(time.perf_counter() - start)
        start = time.perf_counter()
        loop(CELL, loop_rows, seed=at)
        seconds["loop"].append(time.perf_counter() - start)
    ours, plain = rows / statistics.median(seconds["ours"]), loop_rows / statistics.median(seconds["loop"])
    name = torch.cuda.get_device_name(index.device) if index.is_cuda else "cpu"
    record = {
        "bench": "data",
        "task": {"name": "mqar", "version": CELL.version, **vars(CELL)},
        "rows": rows,
        "loop_rows": loop_rows,
        "seconds": seconds,
        "rows_per_s": ours,
        "loop_rows_per_s": plain,
        "ratio": ours / plain,
        "env": environment(name, threads=torch.get_num_threads()),
    }
    Console().print(table(record))
    return record


def draw(index: torch.Tensor) -> None:
    CELL.rows(index, seed=0, split="train")
    if index.is_cuda:
        torch.cuda.synchronize(index.device)


def loop(cell: MQAR, rows: int, seed: int) -> tuple[Ints, Ints]:
    """MQAR row by row: tokens [rows, T] and dense labels [rows, T], -100 where nothing is scored."""
    rng = np.random.RandomState(seed)
    n, L, V = cell.num_kv, cell.seq_len, cell.vocab_size
    weight = np.arange(1, cell.slots + 1) ** (cell.power_a - 1)
    weight /= weight.sum()
    tokens = rng.randint(0, V if cell.filler == "random" else 1, size=(rows, L))
    labels = np.full((rows, L), -100)
    for row, label in zip(tokens, labels, strict=True):
        keys = rng.choice(np.arange(1, V // 2), size=n, replace=False)
        values = rng.choice(np.arange(V // 2, V), size=n, replace=False)
        slots = rng.choice(cell.slots, size=n, replace=False, p=weight)
        row[0 : 2 * n : 2], row[1 : 2 * n : 2] = keys, values
        row[2 * n + 2 * slots] = keys
        label[2 * n + 2 * slots] = values
    return tokens, labels


def table(record: dict[str, Any]) -> Table:
    cell, env = record["task"], record["env"]
    where = env["cpu"] if env["device"] == "cpu" else f"{env['device']} (loop: {env['cpu']})"
    shown = Table(
        title=f"MQAR: {cell['seq_len']} tokens, {cell['num_kv']} pairs, V={cell['vocab_size']}",
        caption=f"median of {ROUNDS} runs, {env['threads']} CPU thread(s), {where}",
    )
    shown.add_column("generator")
    shown.add_column("rows timed", justify="right")
    shown.add_column("rows/s", justify="right")
    shown.add_column("ratio", justify="right")
    shown.add_row("NumPy loop", f"{record['loop_rows']:,}", f"{record['loop_rows_per_s']:,.0f}", "1")
    shown.add_row("mixassay", f"{record['rows']:,}", f"{record['rows_per_s']:,.0f}", f"{record['ratio']:,.0f}")
    return shown
