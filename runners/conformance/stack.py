"""Models stacked by `torch.func.vmap` compute what each computes alone, outputs and gradients: runs train that way."""

import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from mixassay.runners.conformance.outcome import Failed, Measured, NotOffered
from mixassay.runners.conformance.subject import Subject, changes, gap, largest

M = 3
SMALL = 1e-3
"""A parameter's gradient below this part of the largest is compared as if it had that size."""


def check(subject: Subject) -> Measured:
    if not subject.cls.stacks:
        raise NotOffered("stacks is False: its models train one after the other")
    models = [subject.build(seed) for seed in range(M)]
    worst = 0.0
    for T in (1, 40):
        x = torch.stack([subject.tokens(2, T, seed) for seed in range(M)])
        weight = torch.stack([subject.tokens(2, T, M + seed) for seed in range(M)])
        told = [changes(x[0])] if models[0].told_changes else []
        params, buffers = stack_module_state(models)

        def alone(p: dict[str, Tensor], b: dict[str, Tensor], x: Tensor, told: list[Tensor] = told) -> Tensor:
            y: Tensor = functional_call(models[0], (p, b), (x, *told))
            return y

        try:
            y = vmap(alone)(params, buffers, x)
            grads = torch.autograd.grad((y * weight).sum(), list(params.values()), materialize_grads=True)
        except RuntimeError as problem:
            raise Failed(
                f"under vmap: {' '.join(str(problem).split())[:200]}", f"{M} models, x {list(x.shape[1:])}"
            ) from problem
        for i, m in enumerate(models):
            wanted = m(x[i], *told)
            own = torch.autograd.grad((wanted * weight[i]).sum(), list(m.parameters()), materialize_grads=True)
            pairs = [("y", y[i], wanted, 0.0)]
            # A gradient that is 0 in truth is rounding of other terms: a decay's, where one token meets no state.
            least = SMALL * max(map(largest, own))
            pairs += [(f"the gradient of {n}", g[i], o, least) for n, g, o in zip(params, grads, own, strict=True)]
            for name, found, right, least in pairs:
                off = gap(found, right, least)
                if not off <= subject.tolerance:
                    raise Failed(f"model {i} of {M}: {name} is off by {off:.2g}", f"x {list(x.shape[1:])}")
                worst = max(worst, off)
    return {"error": worst}
