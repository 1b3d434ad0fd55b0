"""What papers found about mixers shows at the smallest size at which it can: best and worst of a few fixed seeds.

Numbers differ a little from machine to machine, so bounds leave room; where a mixer must fail, it is by a theorem or an
argument, not for want of training.
"""

from typing import Any

from mixassay.runners.outcome import Outcome
from mixassay.runners.training import Training
from mixassay.spec import MixerSpec, ModelSpec, RunSpec, TaskSpec, TrainSpec

LONG_PARITY = {
    "name": "parity",
    "ask": "every",
    "train_cells": ({"min_len": 16, "seq_len": 16},),
    "eval_cells": ({"min_len": 48, "seq_len": 48},),
}
RECALL = {"name": "mqar", "vocab_size": 16, "seq_len": 16, "num_kv": 3, "filler": "zero"}


def trained(task: dict[str, Any], mixer: dict[str, Any], seeds: list[int]) -> list[float]:
    """Test accuracy of a model of one layer for each seed, after 200 steps."""
    specs = [
        RunSpec(
            suite="outcomes",
            seed=seed,
            task=TaskSpec(valid_examples=10, test_examples=100, **task),
            mixer=MixerSpec(**mixer),
            model=ModelSpec(d_model=16, n_layers=1, init_std=0.1),
            train=TrainSpec(steps=200, batch_size=16, lr=2e-2, betas=(0.9, 0.95), warmup=0.1, clip=1.0, eval_every=200),
        )
        for seed in seeds
    ]
    training, done = Training(specs, "cpu"), list[Outcome]()
    while training.members:
        training.advance()
        done += training.settle()
    return [outcome.metrics["test/accuracy"] for outcome in done]


def test_parity_takes_negative_eigenvalues() -> None:
    """Grazzi et al. 2024 (arXiv 2411.12537): with beta in (0, 2) the delta rule learns it, and goes on to three times
    the length; with beta in (0, 1) all eigenvalues are positive, and a state of finite precision settles."""
    with_them = trained(LONG_PARITY, {"name": "gated_deltanet", "allow_neg_eigval": True}, [0, 2])
    without = trained(LONG_PARITY, {"name": "gated_deltanet"}, [0, 2])
    assert max(with_them) > 0.9
    assert max(without) < 0.7


def test_one_layer_of_attention_recalls_with_a_short_convolution_alone() -> None:
    """Okpekpe and Orvieto 2025 (arXiv 2508.19029): without it a value does not know which key stands before it, and the
    best guess is one of the three values in view."""
    assert max(trained(RECALL, {"name": "attention"}, [0])) < 0.5
    assert max(trained(RECALL, {"name": "attention", "conv": 2}, [0])) > 0.95
