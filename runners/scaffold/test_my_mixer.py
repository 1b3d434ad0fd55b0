"""What must hold of my_mixer: every conformance check, and what it computes."""

from pathlib import Path

import pytest
import torch

from mixassay.runners.conformance.subject import find
from mixassay.runners.conformance.table import CHECKS, Check, judge

SUBJECT = find(f"{Path(__file__).with_name('my_mixer.py')}:MyMixer")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_conformance(check: Check) -> None:
    result = judge(SUBJECT, check)
    if result.status == "not offered":
        pytest.skip(result.message)
    assert result.status == "pass", f"{check.claim}\n{result.message}\n{result.smallest}"


def test_a_decay_of_one_half() -> None:
    m = SUBJECT.cls(1, decay=0.5)
    torch.nn.init.ones_(m.get_parameter("proj.weight"))
    y = m(torch.tensor([[[1.0], [0.0], [4.0]]]))
    torch.testing.assert_close(y, torch.tensor([[[1.0], [0.5], [4.25]]]))
