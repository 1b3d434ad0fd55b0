"""How kernels run in tests, and records made by hand for the tests of what reads and writes them."""

import os
from collections.abc import Callable
from typing import Any

import pytest

# Read when torch is first imported, by a test module. Tiny tensors gain nothing from threads, and on a busy machine
# threads that wait for each other made the kernel tests five times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read when the Hugging Face hub's library is first imported. No test needs its network; without this, one that asks for
# it waits through half a minute of retries.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

# Without a GPU, Triton kernels run in the interpreter. It is chosen when triton is imported: before any test is.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from mixassay.record import RunRecord

MakeRecord = Callable[..., RunRecord]


@pytest.fixture
def make_record() -> MakeRecord:
    """A small valid record; keywords replace fields, `accuracy` fills the metrics."""

    def make(accuracy: float | None = 0.5, **fields: Any) -> RunRecord:
        metrics = {} if accuracy is None else {"test/accuracy": accuracy, "test/loss": 1 - accuracy}
        whole: dict[str, Any] = {
            "key": "k0",
            "cell": "c0",
            "suite": "demo",
            "seed": 0,
            "role": "report",
            "status": "ok",
            "axes": {"mixer": "attention"},
            "tuned": {},
            "config": {"mixer": {"name": "attention"}, "train": {"lr": 0.003}},
            "metrics": metrics,
            "code": {"commit": "a" * 40, "dirty": False, "patch": None, "source": "s1", "version": "0.1.0"},
            "env": {"id": "0123abcd", "class": "cpu, torch 2.13", "device": "cpu"},
            "data": "mqar/1",
            "time": {"start": "2026-01-01T00:00:00Z", "seconds": 2.5},
        }
        return RunRecord.model_validate({**whole, **fields})

    return make
