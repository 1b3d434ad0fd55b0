"""How long a piece of work takes, and how much memory it needs, on a CPU or a CUDA device.

Of kernels on CUDA, what the device takes: its own events around each run, after the L2 cache was overwritten, so that
no run finds its inputs there. The device is held until the CPU has launched the whole run, else short kernels would be
timed by their launches; what the CPU takes is measured beside it. Of anything else, what a caller waits:
`time.perf_counter`, launching included, until the device is done.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from mixassay.errors import UserError
from mixassay.runners.floors import Rates

ROUNDS = 3
FLUSH_BYTES = 2**30  # far beyond any L2
SHORTEST_HOLD = 1e-3  # seconds
LONGEST_HOLD = 0.05  # a run that takes longer to launch is timed by its launches
CYCLES = 2e9  # of a GPU in a second, hardly more
K = TypeVar("K")
T = TypeVar("T")
Run = Callable[[], Any]


class Failure(NamedTuple):
    """Why something has no number: "oom", "unsupported" (it says that it cannot), "wrong" or "error"."""

    status: str
    reason: str


def attempt(run: Callable[[], T]) -> T | Failure:
    """What `run` returns, or what became of it. No benchmark stops because one implementation cannot do one size."""
    try:
        return run()
    except torch.OutOfMemoryError as problem:
        return Failure("oom", _first_line(problem))
    except (UserError, NotImplementedError) as problem:
        return Failure("unsupported", _first_line(problem))
    except Exception as problem:  # other people's code, which may raise anything
        return Failure("error", f"{type(problem).__name__}: {_first_line(problem)}")


def _first_line(problem: Exception) -> str:
    return str(problem).strip().split("\n")[0][:300]


class Clock:
    """Times runs on one device. `budget` is about the seconds to spend on each, warm-up aside."""

    def __init__(self, device: torch.device, budget: float, *, launches: bool = False) -> None:
        """`launches`: on CUDA, too, time what a caller waits."""
        self.device, self.budget, self.cuda = device, budget, device.type == "cuda"
        by_events = self.cuda and not launches
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if by_events else None

    def compare(self, runs: Mapping[K, Run]) -> dict[K, list[float] | Failure]:
        """Milliseconds of each run, several times each. They take turns, so that a busy machine hurts all alike."""
        found: dict[K, list[float] | Failure] = {}
        counts: dict[K, int] = {}
        for name, run in runs.items():
            count = attempt(lambda run=run: self._count(run))  # type: ignore[misc]
            if isinstance(count, Failure):
                found[name] = count
            else:
                counts[name], found[name] = count, []
        for _ in range(ROUNDS):
            for name, count in counts.items():
                before, more = found[name], attempt(lambda name=name, n=count: self.samples(runs[name], n))  # type: ignore[misc]
                if not isinstance(before, Failure):
                    found[name] = more if isinstance(more, Failure) else before + more
        return found

    def samples(self, run: Run, n: int) -> list[float]:
        if self._flush is None:
            return [1e3 * self._seconds(run) for _ in range(n)]
        times: list[float] = []
        hold = SHORTEST_HOLD
        while len(times) < n:
            elapsed, launch = self._by_events(run, hold)
            if launch <= hold or hold >= LONGEST_HOLD:
                times.append(elapsed)
            else:  # the device may have waited; what compiles, or is interrupted once, must not slow all that follow
                hold *= 2
        return times

    def _by_events(self, run: Run, hold: float) -> tuple[float, float]:
        """Milliseconds of the device, and the seconds that the CPU took to launch."""
        assert self._flush is not None
        with torch.cuda.device(self.device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            self._flush.zero_()
            torch.cuda._sleep(int(hold * CYCLES))  # type: ignore[no-untyped-call]
            begun = time.perf_counter()
            start.record()
            run()
            end.record()
            launch = time.perf_counter() - begun
            torch.cuda.synchronize()
        return start.elapsed_time(end), launch

    def launch_ms(self, run: Run) -> float | None:
        """What the CPU takes to launch a run, the median of five; None on a CPU, where launching is running."""
        if not self.cuda:
            return None
        taken = []
        for _ in range(5):
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            run()
            taken.append(1e3 * (time.perf_counter() - start))
        torch.cuda.synchronize(self.device)
        return statistics.median(taken)

    def _seconds(self, run: Run) -> float:
        if self.cuda:
            torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        run()
        if self.cuda:
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def _count(self, run: Run) -> int:
        """How often to run in each round. The runs that this takes also warm up; something slow needs no second."""
        (estimate,) = self.samples(run, 1)
        if estimate < 1000:
            (estimate,) = self.samples(run, 1)
        return max(1, min(30, round(1e3 * self.budget / ROUNDS / max(estimate, 1e-3))))

    def peak_bytes(self, run: Run) -> int | None:
        """The most memory that a run holds beyond what was there before it; None on a CPU, which does not tell."""
        if not self.cuda:
            return None
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def rates(self, dtype: torch.dtype) -> Rates | None:
        """Of copying 1 GiB, read and written, and of a product of two 8192 x 8192 matrices; None on a CPU."""
        if not self.cuda:
            return None
        source = torch.ones(2**30, dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        copy = statistics.median(self.samples(lambda: target.copy_(source), 20)[5:])
        n = 8192
        x, y = (torch.randn(n, n, device=self.device).to(dtype) for _ in range(2))
        product = statistics.median(self.samples(lambda: x @ y, 30)[10:])
        return Rates(2 * source.nbytes / (1e-3 * copy), 2 * n**3 / (1e-3 * product))


def summary(times: list[float]) -> dict[str, float | int]:
    """Median and spread, in milliseconds."""
    ordered = sorted(times)
    low, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.2, 0.8))
    return {"ms": statistics.median(ordered), "ms_min": ordered[0], "ms_p20": low, "ms_p80": high, "n": len(ordered)}
