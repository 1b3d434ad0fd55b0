"""Single checks and what is under them: shrinking, fits, how a subject is found and what is told of faults."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from mixassay.errors import UserError
from mixassay.mixers import Mixer, State, mixer
from mixassay.runners.conformance import (
    after_end,
    batch,
    determinism,
    dtypes,
    gradients,
    growth,
    initialisation,
    packed,
    padding,
    parameters,
    prefill,
    shape,
    stack,
    state_size,
)
from mixassay.runners.conformance.outcome import Failed, NotOffered
from mixassay.runners.conformance.shrink import describe, holds
from mixassay.runners.conformance.state_size import fitted
from mixassay.runners.conformance.subject import Subject, find
from mixassay.runners.conformance.table import CHECKS, chosen, judge


class Linear(Mixer):
    """Each token for itself: causal, and the state is empty."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj(x)
        return y


def subject(cls: type[Mixer], **how: Any) -> Subject:
    return Subject(cls.__name__, cls, **how)


class FlatOutput(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(-1)


class FixedLength(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(-1, 33, x.shape[-1]).view(x.shape) if x.shape[1] > 2 else super().forward(x)


class MeanOverBatch(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - x.mean(0)


class ReadsBehind(Linear):
    """Takes memory that is not its own: as a kernel without a mask does."""

    def forward(self, x: Tensor) -> Tensor:
        longer = x.as_strided((len(x), x.shape[1] + 1, x.shape[2]), x.stride()) if x.stride(0) > x[0].numel() else x
        return super().forward(x) + 0 * longer[:, -1:]


class SumOfAll(Linear):
    """A loss of its outputs depends on the padding by its gradients only where those are of a norm over all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.detach().square().mean((1, 2), keepdim=True)
        return super().forward(x) * scale


class WrongGradient(Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.square() + (y - y.detach())


class Overflows(Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * (1e6 * y / 1e6)


class InPlace(Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros(x.shape, dtype=x.dtype)
        y[:, 0] = super().forward(x)[:, 0]
        return y + super().forward(x)


class Noisy(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand(())


class Explodes(Linear):
    def forward(self, x: Tensor) -> Tensor:
        t = torch.arange(x.shape[1], dtype=x.dtype)
        return super().forward(x) * (1.05**t)[:, None]


class Unused(Linear):
    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.spare = nn.Parameter(torch.ones(3))


class Shared(Linear):
    """Two layers hold one parameter, and the second draws it again."""

    proj_of_all: ClassVar[list[nn.Linear]] = []

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.proj_of_all.append(self.proj)
        self.proj = self.proj_of_all[0]
        self.proj.reset_parameters()


FAULTS = [
    (shape, FlatOutput, r"forward returns \[1, 1\] torch.float64 cpu for \[1, 1, 16\]"),
    (shape, FixedLength, "raises RuntimeError: shape"),
    (batch, MeanOverBatch, "a row's y is off by"),
    (after_end, ReadsBehind, "NaN"),
    (padding, SumOfAll, "y moves by .* with what stands in the padding"),
    (gradients, WrongGradient, "along a random direction of x the gradient is"),
    (dtypes, Overflows, "fp16"),
    (stack, InPlace, "under vmap: "),
    (determinism, Noisy, "y differs between two runs with one seed"),
    (growth, Explodes, "from token 128 to 256 y grows"),
    (parameters, Unused, r"parameter spare \[3\] gets no gradient"),
    (initialisation, Shared, "parameter proj.weight of layer 0 is not as the mixer made it"),
]


@pytest.mark.parametrize(("module", "cls", "message"), FAULTS, ids=[f"{c.__name__}" for _, c, _ in FAULTS])
def test_a_fault_is_found_and_a_sound_mixer_passes(module: Any, cls: type[Mixer], message: str) -> None:
    with pytest.raises(Failed, match=message):
        module.check(subject(cls))
    module.check(subject(Linear))


class Packed(Linear):
    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        ends = [x.shape[1]] if cu_seqlens is None else cu_seqlens[1:].tolist()
        begins = [0, *ends[:-1]]
        return torch.cat([self.proj(x[:, i:j].cumsum(1)) for i, j in zip(begins, ends, strict=True)], dim=1)


class PackedTogether(Packed):
    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        return super().forward(x)


def test_packed_sequences() -> None:
    assert packed.check(subject(Packed))["error"] == 0
    with pytest.raises(Failed, match=r"packed sequences of .* y is off by"):
        packed.check(subject(PackedTogether))
    with pytest.raises(NotOffered, match="no argument cu_seqlens"):
        packed.check(subject(Linear))


class Sums(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.cumsum(1))

    def init_state(self, batch: int) -> State:
        return self.proj.weight.new_zeros(batch, self.d_model)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return self.proj(state + x), state + x

    def prefill(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        seen = x.cumsum(1) + state[:, None]
        return self.proj(seen), seen[:, -1]


class ForgetsItsPast(Sums):
    def prefill(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return super().prefill(x, torch.zeros_like(state))


class SaysLess(Sums):
    def state_bytes(self, T: int) -> int:
        return 1


def test_prefill_and_state_bytes() -> None:
    prefill.check(subject(Sums))
    assert state_size.check(subject(Sums)) == {"law": "constant", "bytes at T=128": 64}
    with pytest.raises(Failed, match="y of prefills up to tokens"):
        prefill.check(subject(ForgetsItsPast))
    with pytest.raises(Failed, match=r"state_bytes\(8\) is 1, the live state has 64 bytes"):
        state_size.check(subject(SaysLess))
    for check in (prefill, state_size):
        with pytest.raises(NotOffered):
            check.check(subject(Linear))


def test_stacked_gradients_that_are_rounding_are_let_pass_and_larger_ones_are_not() -> None:
    """A decay that meets no state has a gradient of 0 in truth, and on a GPU of 1e-8 with any sign."""

    class Rounds(Linear):
        size = 1e-15

        def __init__(self, d_model: int) -> None:
            super().__init__(d_model)
            self.gain = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            stacked = torch._C._functorch.is_batchedtensor(x)  # type: ignore[attr-defined]
            y: Tensor = self.proj(x) + self.gain * (self.size if stacked else -self.size)
            return y

    class Differs(Rounds):
        size = 1e-9

    stack.check(Subject("rounds", Rounds))
    with pytest.raises(Failed, match="gain is off by"):
        stack.check(Subject("differs", Differs))


def test_laws() -> None:
    lengths = [8, 16, 32, 64, 128, 256]
    assert fitted(lengths, [64] * 6) == "constant"
    assert fitted(lengths, [0] * 6) == "constant"
    assert fitted(lengths, [4, 5, 6, 7, 8, 9]) == "log"
    assert fitted(lengths, [10 + 4 * T for T in lengths]) == "linear"
    assert fitted(lengths, [T * T for T in lengths]) == "other"


def test_shrinking_keeps_what_the_fault_needs() -> None:
    def fault(x: Tensor) -> str | None:
        """Two tokens that are not zero, three apart, in one row."""
        there = x.any(-1)
        return "two" if bool((there[:, 3:] & there[:, :-3]).any()) else None

    with pytest.raises(Failed, match="two") as caught:
        holds(fault, [torch.zeros(2, 9, 4), torch.randn(3, 40, 4, generator=torch.Generator().manual_seed(0))])
    assert caught.value.smallest == "x [1, 4, 4] = 0 but x[0, 0, 0] = 1, x[0, 3, 0] = 1"
    assert describe(torch.zeros(1, 2, 3)) == "x [1, 2, 3] = 0"
    assert describe(torch.ones(1, 2, 4)) == "x [1, 2, 4], zero but for the normal numbers of tokens [0, 0], [0, 1]"


def test_how_a_subject_is_found(tmp_path: Path) -> None:
    file = tmp_path / "two.py"
    file.write_text(
        "from mixassay.mixers import Mixer\n"
        "class One(Mixer):\n    def __init__(self, d_model: int, *, heads: int = 1) -> None: super().__init__()\n"
        "class Two(One): ...\n"
    )
    assert find(f"{file}:Two", {"heads": 2}).args == {"heads": 2}
    assert find("mixassay.mixers.mamba2").cls is find("mamba2").cls is mixer["mamba2"]
    assert find("mixassay.mixers.dla:LinearAttention").cls is mixer["linear_attention"]
    for name, args, message in [
        (str(file), {}, "name one of the mixers of .*Known: One, Two"),
        (f"{file}:Too", {}, 'Did you mean "Two"?'),
        (f"{file}:One", {"head": 2}, 'unknown key "head". Did you mean "heads"?'),
        (f"{file}:One", {"heads": "x"}, 'heads should be a whole number, got "x"'),
        ("atention", {}, 'Did you mean "attention"?'),
        ("attention", {"heads": 3}, "heads=3 does not divide d_model=16"),
        ("mixassay.errors", {}, "mixassay.errors has no subclass of"),
        ("mixassay.nowhere:M", {}, "cannot be imported"),
        (str(tmp_path / "none.py"), {}, "no such file"),
    ]:
        with pytest.raises(UserError, match=message):
            find(name, args)


def test_checks_are_listed_once_and_chosen_by_name() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    files = {path.stem for path in (Path(shape.__file__).parent).glob("*.py")}
    assert files - set(names) == {"__init__", "outcome", "records", "shrink", "subject", "table"}
    for i, check in enumerate(CHECKS):
        assert set(check.needs) <= set(names[:i]), "what is needed comes first"
        assert check.claim.endswith("."), check.name
    assert [check.name for check in chosen(["batch", "shape"])] == ["shape", "batch"]
    with pytest.raises(UserError, match=r'unknown check "causalty"\. Did you mean "causality"\?'):
        chosen(["causalty"])


def test_what_a_check_raises_of_itself_is_a_failure() -> None:
    class Raises(Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("no\nsuch")

    result = judge(subject(Raises), chosen(["growth"])[0])
    assert (result.status, result.message) == ("fail", r"raises KeyError: 'no\nsuch'")
