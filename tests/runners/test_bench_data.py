"""The data benchmark: its loop draws the same task, its record is plain data, its errors are plain words."""

import json

import numpy as np
import pytest
import torch

from mixassay.errors import UserError
from mixassay.runners.bench_data import ROUNDS, bench_data, loop
from mixassay.tasks.mqar import MQAR


@pytest.mark.parametrize("filler", ["zero", "random"])
def test_the_loop_draws_mqar(filler: str) -> None:
    cell = MQAR(vocab_size=64, seq_len=32, num_kv=4, filler="zero" if filler == "zero" else "random")
    tokens, labels = loop(cell, 300, seed=0)
    assert tokens.shape == labels.shape == (300, 32)
    for row, label in zip(tokens, labels, strict=True):
        keys, values = row[0:8:2], row[1:8:2]
        assert len(set(keys)) == len(set(values)) == 4
        assert keys.min() >= 1
        assert keys.max() < 32 <= values.min()
        (asked,) = np.nonzero(label >= 0)
        assert len(asked) == 4
        assert asked.min() >= 8
        assert (asked % 2 == 0).all()
        bound = dict(zip(keys.tolist(), values.tolist(), strict=True))
        assert [bound[k] for k in row[asked].tolist()] == label[asked].tolist()
        if filler == "zero":
            assert row[8:].astype(bool).sum() == 4


def test_the_record_is_plain_data_and_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    record = bench_data(rows=200, loop_rows=20)
    assert json.loads(json.dumps(record)) == record
    assert record["task"] == {"name": "mqar", "version": 1, **vars(MQAR(num_kv=64))}
    assert [len(x) for x in record["seconds"].values()] == [ROUNDS, ROUNDS]
    assert record["rows_per_s"] == pytest.approx(200 / sorted(record["seconds"]["ours"])[1])
    assert record["loop_rows_per_s"] == pytest.approx(20 / sorted(record["seconds"]["loop"])[1])
    assert record["ratio"] == pytest.approx(record["rows_per_s"] / record["loop_rows_per_s"])
    assert record["env"]["threads"] == torch.get_num_threads()
    shown = capsys.readouterr().out
    assert "NumPy loop" in shown
    assert f"{record['ratio']:,.0f}" in shown


def test_what_cannot_be_timed_is_said() -> None:
    with pytest.raises(UserError, match="at least one row"):
        bench_data(rows=0)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match='"cuda" was asked for, but this PyTorch sees no CUDA device'):
            bench_data(device="cuda")
