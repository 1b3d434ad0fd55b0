"""Whether a mixer draws random numbers while it runs. A seed covers its initialisation and nothing later, so what it
draws from torch's global generator depends on what else the process has done, and no run could be had again."""

import contextlib
from collections.abc import Iterator

import torch


class Drawn(RuntimeError):
    """A step drew from the global generator."""


@contextlib.contextmanager
def nothing_drawn() -> Iterator[None]:
    """Raise `Drawn` where the block moves the CPU's generator. Under vmap torch raises an error of its own."""
    before = torch.get_rng_state()
    yield
    if not torch.equal(before, torch.get_rng_state()):
        raise Drawn(
            "forward draws from torch's global generator (dropout, or torch.rand), so that no run could be repeated;"
            " model.dropout drops embeddings by the run's seed"
        )
