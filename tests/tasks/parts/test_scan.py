"""Prefixes of something that does not commute, against a loop."""

import pytest
import torch

from mixassay.tasks.parts.scan import Parts, prefixes


@pytest.mark.parametrize("T", [0, 1, 2, 3, 7, 8, 9, 33])
def test_affine_maps_against_a_loop(T: int) -> None:
    generator = torch.Generator().manual_seed(T)
    a, b = (torch.randint(97, (5, T), generator=generator) for _ in range(2))

    def then(first: Parts, second: Parts) -> Parts:
        return second[0] * first[0] % 97, (second[0] * first[1] + second[1]) % 97

    scale, shift = prefixes((a, b), then)
    for n in range(5):
        x, y = 1, 0
        for t in range(T):
            x, y = int(a[n, t]) * x % 97, (int(a[n, t]) * y + int(b[n, t])) % 97
            assert (x, y) == (int(scale[n, t]), int(shift[n, t]))
