"""Digits: y and gradients in float32, and under autocast to bfloat16 and float16, are finite and near float64's.

Relative errors in the norm of y. A state keeps float32 under autocast, but for a cache, one that grows by what each
token brings: no sums lose digits there. float16 overflows at 65504, so a mixer may not
serve it; a suite that trains in bfloat16 asks for it alone.
"""

import torch
from torch.utils import _pytree as pytree

from mixassay.runners.conformance.outcome import Failed, Measured
from mixassay.runners.conformance.subject import Subject, forward, run_steps

T = 70
ALLOWED = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def check(subject: Subject) -> Measured:
    m, exact = subject.build(dtype=torch.float32), subject.build(dtype=torch.float64)
    x = subject.tokens(2, T, dtype=torch.float32)
    kind, errors = subject.device.type, Measured()
    with torch.no_grad():
        wanted = forward(exact, x.double())
    for dtype, allowed in ALLOWED.items():
        name = NAMES[dtype]
        with torch.autocast(kind, dtype=dtype, enabled=dtype is not torch.float32):
            y = forward(m, x)
            state = run_steps(m, x[:, :3])[1] if subject.steps else ()
        grads = torch.autograd.grad(y.double().square().sum(), list(m.parameters()), materialize_grads=True)
        off = float((y.detach().double() - wanted).norm() / wanted.norm().clamp(min=1e-30))
        if not off <= allowed:
            raise Failed(f"{name}: y of {T} tokens is off by {off:.2g}, more than {allowed:g}")
        for (who, _), grad in zip(m.named_parameters(), grads, strict=True):
            if not bool(grad.isfinite().all()):
                raise Failed(f"{name}: the gradient of {who} is not finite")
        wide = (torch.float32, dtype) if subject.steps and m.state_law == "linear" else (torch.float32,)
        for kept in pytree.tree_leaves(state):
            if isinstance(kept, torch.Tensor) and kept.is_floating_point() and kept.dtype not in wide:
                raise Failed(f"{name}: the state is kept in {kept.dtype}, which loses digits at every step")
        errors[name] = off
    return errors
