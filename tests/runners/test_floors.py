"""The floors are the numbers worked out by hand: microseconds for 2^20 token-heads at 4.3 TB/s and 790 TFLOP/s."""

import pytest

from mixassay.runners import floors
from mixassay.runners.floors import Rates, Work

RATES = Rates(4.3e12, 790e12)
GDR, LL_GDR = "gated_delta_rule", "log_linear_gated_delta_rule"

# operator, K, V, T, bytes of gates, microseconds by memory and by products: forward, then backward
BY_HAND = [
    ("linear_attention", 64, 64, 4096, 4, (126, 43), (220, 109)),
    ("linear_attention", 128, 64, 4096, 4, (188, 76), (345, 196)),
    ("linear_attention", 128, 128, 4096, 4, (251, 130), (439, 326)),
    (GDR, 64, 64, 4096, 8, (127, 89), (222, 261)),
    (GDR, 128, 128, 4096, 8, (252, 241), (441, 674)),
    ("log_linear_attention", 64, 64, 4096, 4 + 2 * 13, (132, 65), (233, 152)),
    ("log_linear_attention", 64, 64, 131072, 4 + 2 * 18, (135, 92), (238, 207)),
    ("log_linear_attention", 128, 128, 4096, 4 + 2 * 13, (257, 217), (452, 500)),
    ("log_linear_attention", 128, 128, 131072, 4 + 2 * 18, (259, 326), (457, 718)),
    (LL_GDR, 64, 64, 4096, 8 + 2 * 13, (133, 187), (235, 566)),
    (LL_GDR, 128, 64, 4096, 8 + 2 * 13, (196, 339), (360, 1020)),
    (LL_GDR, 128, 128, 131072, 8 + 2 * 18, (260, 904), (458, 2710)),
    ("softmax_attention", 64, 64, 4096, 0, (125, 696), (218, 1740)),
    ("softmax_attention", 128, 128, 131072, 0, (250, 44537), (437, 111343)),
    ("hla2", 64, 64, 4096, 4, (126, 87), (220, 218)),
    ("ahla", 64, 64, 4096, 4, (126, 76), (220, 207)),
    ("hla3", 128, 128, 4096, 4, (251, 370), (439, 957)),
    ("dla", 64, 64, 2048, 4 + 4 * 30, (155, 160), (279, 256)),  # 7.75 slots
    ("dla", 64, 64, 4096, 4 + 4 * 30, (155, 247), (279, 429)),  # 15.7
    ("dla", 128, 128, 131072, 4 + 4 * 30, (280, 1503), (497, 2811)),  # 29.56
]


@pytest.mark.parametrize(("op", "K", "V", "T", "gates", "forward", "backward"), BY_HAND)
def test_floors_are_those_worked_out_by_hand(
    op: str, K: int, V: int, T: int, gates: int, forward: tuple[int, int], backward: tuple[int, int]
) -> None:
    for work, (by_memory, by_products) in (
        (floors.forward(op, T, K, V, gates=gates), forward),
        (floors.backward(op, T, K, V, gates=gates), backward),
    ):
        parts = [Work(0, work.bytes), Work(work.flops, 0)]
        assert [1e3 * floors.ms(part, RATES, 2**20) for part in parts] == pytest.approx(
            [by_memory, by_products], rel=4e-3, abs=0.5
        )
        assert 1e3 * floors.ms(work, RATES, 2**20) == pytest.approx(max(by_memory, by_products), rel=4e-3, abs=0.5)


def test_float32_moves_twice_the_bytes() -> None:
    half, full = (floors.forward("linear_attention", 4096, 64, 64, width=width, gates=4) for width in (2, 4))
    assert full.bytes - 4 == 2 * (half.bytes - 4)


def test_a_sequence_of_one_chunk_has_no_levels_between_chunks() -> None:
    assert floors.forward("log_linear_attention", 16, 64, 64).flops == 2 * 64 * 128 + 2 * 64 * 64
