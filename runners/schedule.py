"""The learning rate over a run."""

import math


def schedule(kind: str, step: int, steps: int, warmup: float) -> float:
    """Share of the peak learning rate at update `step` (0-based) of `steps`; linear warm-up over a share of them."""
    ramp = math.floor(warmup * steps)
    if step < ramp:
        return (step + 1) / ramp
    done = (step - ramp) / max(1, steps - ramp)
    return {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[kind]
