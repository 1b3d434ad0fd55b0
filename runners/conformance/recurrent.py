"""The recurrent form is the parallel form: y_t of `step` after `step` is y_t of `forward`, and a state that was stepped
from can be stepped from again.
"""

from torch import Tensor

from mixassay.runners.conformance.outcome import Measured, NotOffered
from mixassay.runners.conformance.shrink import holds
from mixassay.runners.conformance.subject import Subject, forward, gap, run_steps


def check(subject: Subject) -> Measured:
    if not subject.steps:
        raise NotOffered("no init_state and step")
    m = subject.build().requires_grad_(False)
    worst = 0.0

    def fault(x: Tensor) -> str | None:
        nonlocal worst
        before, (y, _) = max(x.shape[1] - 3, 0), run_steps(m, x)
        off = gap(y, forward(m, x))
        if off > subject.tolerance:
            return f"y of steps is off by {off:.2g} from y of forward"
        worst = max(worst, off)
        if before and not m.told_changes:
            _, state = run_steps(m, x[:, :before])
            once, again = (run_steps(m, x[:, before:], state)[0] for _ in range(2))
            off = gap(again, once)
            if off > subject.rounding:
                return f"stepped from one state twice, y differs by {off:.2g}: step changes the state that it is given"
        return None

    lengths = (1, 2, 3, 17, 65, 130, 200) if subject.full else (1, 2, 17, 70)
    holds(fault, (subject.tokens(2, T) for T in lengths))
    return {"error": worst}
