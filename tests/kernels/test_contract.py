"""The cases of the contract cover what they claim."""

from itertools import combinations, product

from . import contract


def test_every_pair_of_values_occurs():
    values = {
        "chunk": contract.CHUNKS,
        "heads": contract.HEADS,
        "dims": contract.DIMS,
        "gate": contract.GATES,
        "loss": contract.LOSSES,
        "start": contract.STARTS,
    }
    cases = list(contract.cases())
    missing = [
        (a, x, b, y)
        for a, b in combinations(values, 2)
        for x, y in product(values[a], values[b])
        if not any(getattr(c, a) == x and getattr(c, b) == y for c in cases)
    ]
    assert missing == []
    assert {(c.T, c.chunk) for c in cases} == set(product(contract.LENGTHS, contract.CHUNKS))
