"""The processes that train one model together, each on rows of its own: torch's DistributedDataParallel.

The process that was asked to train is rank 0. It starts the others, decides for all, and writes everything. They meet
through a file, since they share a host; decisions go through gloo on the CPU, so that no GPU waits for them.
"""

import contextlib
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mixassay.errors import UserError

PATIENCE = timedelta(minutes=20)
"""How long a rank waits for the others, which may be measuring state or compiling."""


@dataclass(frozen=True)
class Ranks:
    """Rank `rank` of `n`. With n = 1 nothing is distributed."""

    rank: int = 0
    n: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def part(self, batch: int) -> slice:
        """This rank's rows of a batch, which n must divide."""
        assert batch % self.n == 0, f"{batch} rows for {self.n} ranks"
        return slice(self.rank * batch // self.n, (self.rank + 1) * batch // self.n)

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module with gradients that are means over the ranks."""
        if self.n == 1:
            return module
        on = next(module.parameters()).device
        devices = [on.index] if on.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=devices, gradient_as_bucket_view=True)

    def apart(self, module: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Inside, gradients of a wrapped module add up on each rank, until a backward pass outside of it."""
        return module.no_sync() if isinstance(module, DistributedDataParallel) else contextlib.nullcontext()

    def agree(self, decision: int) -> int:
        """What rank 0 has decided, on every rank."""
        if self.n == 1:
            return decision
        told = torch.tensor([decision])
        dist.broadcast(told, 0)
        return int(told)

    def mean(self, x: Tensor) -> Tensor:
        """Over the ranks."""
        if self.n > 1:
            x = x.clone()
            dist.all_reduce(x)
        return x / self.n


@contextlib.contextmanager
def together(n: int, device: str, follow: Callable[..., None], *args: Any) -> Iterator[Ranks]:
    """Rank 0 of n. The others run `follow(ranks, device, *args)` in processes of their own, on the devices that come
    next, and must end when rank 0 leaves the block."""
    if n == 1:
        yield Ranks()
        return
    base = torch.cuda.current_device() if device != "cpu" else 0
    with tempfile.TemporaryDirectory() as folder:
        start = multiprocessing.get_context("spawn")
        meet, threads = str(Path(folder) / "meet"), torch.get_num_threads()
        others = [
            start.Process(target=_other, args=(rank, n, device, base + rank, threads, meet, follow, args))
            for rank in range(1, n)
        ]
        for process in others:
            process.start()
        try:
            _join(0, n, device, meet)
            yield Ranks(0, n)
        except Exception as problem:
            for process in others:
                process.join(timeout=5)
            dead = [f"rank {rank} ended with {p.exitcode}" for rank, p in enumerate(others, start=1) if p.exitcode]
            if dead and not isinstance(problem, UserError):
                raise RuntimeError(f"{', '.join(dead)} ({' '.join(str(problem).split())[:200]})") from problem
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            for process in others:
                process.join(timeout=60)
                process.kill()


def _other(
    rank: int, n: int, device: str, index: int, threads: int, meet: str, follow: Callable[..., None], args: Any
) -> None:
    torch.set_num_threads(threads)
    if device != "cpu":
        torch.cuda.set_device(index)
    _join(rank, n, device, meet)
    try:
        follow(Ranks(rank, n), device, *args)
    finally:
        dist.destroy_process_group()


def _join(rank: int, n: int, device: str, meet: str) -> None:
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{meet}", rank=rank, world_size=n, timeout=PATIENCE)
