"""The rows of a run, step by step: on a GPU made ahead by processes of their own, since a RULER sample takes longer to
make than a model takes to learn from it."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mixassay.runners.machine import cores
from mixassay.runners.stream import Stream

AHEAD = 2
"""Batches that each process makes ahead."""

MAKERS = 16
"""Processes at most. Eight rows of 4096 tokens, six of them samples, take one core 50 ms with bytes, 400 with a BPE."""


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """Of every batch the rows `part`: tokens and labels int64 [rows, T] by the step's number."""

    def __init__(self, stream: Stream, seed: int, part: slice) -> None:
        self.stream, self.seed, self.part = stream, seed, part

    def __len__(self) -> int:
        return self.stream.steps

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        rows = self.stream.rows(step, (self.seed,), "cpu", self.part)
        return rows.tokens, rows.targets()

    def of(self, device: str, start: int, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
        """From step `start` on, on the device. Made ahead by so many processes; with 0 here, as they are asked for."""
        if workers == 0:
            yield from (self[step] for step in range(start, len(self)))
            return
        loader: DataLoader[tuple[Tensor, Tensor]] = DataLoader(
            self,
            batch_size=None,
            sampler=range(start, len(self)),
            num_workers=workers,
            prefetch_factor=AHEAD,
            pin_memory=device != "cpu",
            multiprocessing_context="fork",  # the children make rows alone and never touch the GPU
        )
        for tokens, labels in loader:
            yield tokens.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def makers(device: str) -> int:
    """Processes that make batches for a run on this device: a GPU's share of the cores, none on a CPU."""
    if device == "cpu":
        return 0
    return max(1, min(MAKERS, cores() // torch.cuda.device_count() - 1))
