"""Prefill is the parallel form with a state: one `prefill`, another from its state on, then steps, give forward's y."""

import torch
from torch import Tensor

from mixassay.mixers import Mixer
from mixassay.runners.conformance.outcome import Measured, NotOffered
from mixassay.runners.conformance.shrink import holds
from mixassay.runners.conformance.subject import Subject, forward, gap, run_steps


def check(subject: Subject) -> Measured:
    if not subject.steps:
        raise NotOffered("no init_state and step")
    if subject.cls.prefill is Mixer.prefill:
        raise NotOffered("no prefill of its own: it is made of steps")
    m = subject.build().requires_grad_(False)
    if m.told_changes:
        raise NotOffered("prefill is not told the changes that forward needs")
    worst = 0.0

    def fault(x: Tensor) -> str | None:
        nonlocal worst
        state, y = m.init_state(len(x)), []
        most = 4 * x.shape[1] // 5
        for part in (x[:, : most // 2], x[:, most // 2 : most]):
            if part.shape[1]:
                found, state = m.prefill(part, state)
                y.append(found)
        y.append(run_steps(m, x[:, most:], state)[0])
        off = gap(torch.cat(y, dim=1), forward(m, x))
        if off > subject.tolerance:
            return f"y of prefills up to tokens {most // 2} and {most}, then steps, is off by {off:.2g} from forward's"
        worst = max(worst, off)
        return None

    holds(fault, (subject.tokens(2, T) for T in (2, 3, 6, 40, 81, *((161, 260) if subject.full else ()))))
    return {"error": worst}
