"""`mixassay eval` where memory runs out, without a GPU: a model that has room for so many rows of so many tokens."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mixassay.errors import UserError
from mixassay.model import Model
from mixassay.runners.eval.kept import Subject
from mixassay.runners.eval.session import Model as Asked
from mixassay.runners.store import Store
from mixassay.tokens import Bytes

Cramp = Callable[[Callable[[int], int]], list[tuple[int, int]]]


@pytest.fixture
def cramp(monkeypatch: pytest.MonkeyPatch) -> Cramp:
    """Leaves room for so many rows of T tokens; returns the prefills that are tried, (T, rows)."""
    whole = Model.prefill

    def leave(rows: Callable[[int], int]) -> list[tuple[int, int]]:
        tried = []

        def prefill(self: Model, tokens: torch.Tensor) -> Any:
            n, T = tokens.shape
            tried.append((T, n))
            if n > rows(T):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 918.00 MiB")
            return whole(self, tokens)

        monkeypatch.setattr(Model, "prefill", prefill)
        return tried

    return leave


def answers(place: Any, suite: str) -> dict[tuple[str, int], tuple[str, float | None]]:
    """Hash of the answers, and the score, by task and length."""
    found = {}
    for record in Store(place.folder / "results").read(suite).records:
        assert record.samples is not None
        task = record.config["task"]
        found[task["name"], task["length"]] = (record.samples.answers, record.metrics["test/accuracy"])
    return found


@pytest.mark.parametrize("engine", ["direct", "lm-eval"])
def test_a_batch_is_halved_for_its_length_and_longer_ones(place: Any, kept: Any, cramp: Cramp, engine: str) -> None:
    if engine == "lm-eval":
        pytest.importorskip("lm_eval")
    words = ["--model", f"run:{kept('mamba2')}", "--suite", "niah", "--limit", "4", "--engine", engine]
    words += ["--tasks", "niah_single_1,niah_single_2", "--lengths", "640,768,896", "--precision", "fp64"]
    assert place.run("eval", *words, "--batch", "4", "--name", "roomy").code == 0
    tried = cramp(lambda T: 4 if T < 560 else 2)
    said = place.run("eval", *words, "--batch", "8")
    assert said.code == 0, said.err
    assert [line for line in said.err.splitlines() if "memory" in line] == [
        "niah_single_1@768 (seed 42): out of memory at batch 8; went on at batch 2"
    ]
    assert {rows for T, rows in tried if 1 < T < 560} == {4}, "of both tasks: what is shorter goes on as it was"
    assert [rows for T, rows in tried if 560 < T < 700] == [4, 2, 2, 2, 2]
    assert {rows for T, rows in tried if T > 700} == {2}
    assert answers(place, "niah") == answers(place, "roomy")
    assert len(answers(place, "niah")) == 6


def test_a_prompt_that_does_not_fit_ends_the_command_and_what_was_done_is_kept(
    place: Any, kept: Any, cramp: Cramp, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--model", f"run:{kept('mamba2')}", "--suite", "niah", "--limit", "2", "--engine", "direct"]
    words += ["--tasks", "niah_single_1,niah_single_2", "--lengths", "640,768"]
    with monkeypatch.context():
        cramp(lambda T: 2 if T < 560 else 0)
        said = place.run("eval", *words)
    assert said.code == 2
    assert "Traceback" not in said.err
    assert said.err.splitlines()[-1] == (
        "niah_single_1@768 (seed 42): memory does not do for one row of up to 768 tokens. What would help: shorter "
        "--lengths, --precision bf16, or a device with more memory or with no other process on it. All sets before are "
        "kept: the same command goes on behind them."
    )
    assert answers(place, "niah").keys() == {("niah_single_1", 640)}
    cramp(lambda T: 2)
    said = place.run("eval", *words)
    assert said.code == 0, said.err
    assert said.err.count("stored before") == 1
    assert len(answers(place, "niah")) == 4


def test_a_model_of_another_library_is_told_of_a_smaller_batch() -> None:
    """Its rows are padded to one length: to halve its batch could move numbers."""
    model = Asked(Subject({}, None, 0), Bytes(), None, object(), batch=16)
    message = r"t: memory does not do for 16 rows of up to 1,024 tokens\. What would help: a smaller --batch, shorter"
    with pytest.raises(UserError, match=message), model.room("t", 1024, print):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(RuntimeError, match="another"), model.room("t", 1024, print):
        raise RuntimeError("another")
