"""Whether a mixer draws random numbers while it runs. A seed covers its initialisation and nothing later, so what it
draws from torch's global generator depends on what else the process has done, and no run could be had again."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


class Drawn(RuntimeError):
    """A step drew from the global generator."""


@contextlib.contextmanager
def nothing_drawn(device: str, step: int) -> Iterator[None]:
    """Raise `Drawn` where the block, the first step (0), moves the device's generator; later ones are not watched.

    Under vmap torch raises an error of its own.
    """
    before = state(device) if step == 0 else None
    yield
    if before is not None and not torch.equal(before, state(device)):
        raise Drawn(
            "forward draws from torch's global generator (dropout, or torch.rand), so that no run could be repeated;"
            " model.dropout drops embeddings by the run's seed"
        )


def state(device: str) -> Tensor:
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(device)
