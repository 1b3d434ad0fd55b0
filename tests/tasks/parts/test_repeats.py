"""First and previous places of equal ids, against loops."""

import pytest
import torch

from mixassay.tasks.parts.repeats import first, previous


@pytest.mark.parametrize(("P", "ids"), [(1, 3), (2, 2), (17, 1), (17, 5), (40, 2**32)])
def test_against_loops(P: int, ids: int) -> None:
    rows = torch.randint(ids, (50, P), generator=torch.Generator().manual_seed(P))
    for row, begun, before in zip(rows.tolist(), first(rows).tolist(), previous(rows).tolist(), strict=True):
        for t, id in enumerate(row):
            seen = [s for s in range(t) if row[s] == id]
            assert begun[t] == (seen[0] if seen else t)
            assert before[t] == (seen[-1] if seen else -1)
