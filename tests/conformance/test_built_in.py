"""Every built-in mixer passes every check, in quick settings. The full ones are run for `results/conformance`."""

import pytest

from mixassay.mixers import mixer
from mixassay.runners.conformance.subject import find
from mixassay.runners.conformance.table import run


@pytest.mark.parametrize("name", mixer.built_in())
def test_conformance(name: str) -> None:
    found = list(run(find(name)))
    assert [(r.check.name, r.message, r.smallest) for r in found if r.status in ("fail", "not judged")] == []
    passed = {r.check.name: r.measured for r in found if r.status == "pass"}
    assert len(passed) >= 21, "packed sequences may be missing, no more"
    assert passed["parameters"]["parameters"] == sum(p.numel() for p in mixer[name](16).parameters())
