"""Time of one forward against T: the exponent p of a fit c T^p to the longer half. Measured, never judged.

On a CPU it is the process's own time, which other processes do not stretch. Short sequences cost launches and Python
alone, so that a linear mixer shows less than 1 there.
"""

import time

import torch

from mixassay.mixers import Mixer
from mixassay.runners.conformance.outcome import Measured
from mixassay.runners.conformance.subject import Subject, forward

SLOW = 0.1  # seconds; longer sequences are not tried


@torch.no_grad()
def check(subject: Subject) -> Measured:
    m = subject.build(dtype=torch.float32)
    lengths, seconds = [], []
    for T in (2**i for i in range(6, 15 if subject.full else 11)):
        x = subject.tokens(1, T, dtype=torch.float32)
        lengths.append(T)
        seconds.append(min(timed(m, x) for _ in range(5)))
        if seconds[-1] > SLOW:
            break
    half = len(lengths) // 2
    logs = torch.tensor([lengths[half:], seconds[half:]], dtype=torch.float64).log()
    run, rise = logs - logs.mean(1, keepdim=True)
    exponent = float((run * rise).sum() / run.square().sum().clamp(min=1e-9))
    return {"exponent": round(exponent, 2) + 0.0, f"ms at T={lengths[-1]}": 1e3 * seconds[-1]}


def timed(m: Mixer, x: torch.Tensor) -> float:
    on_gpu = x.device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    start = clock()
    forward(m, x)
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - start
