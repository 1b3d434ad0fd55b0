"""It trains: one layer behind a short convolution on a small recall task (MQAR), its loss falls and stays finite.

The score is accuracy on fresh rows, next to chance: that of a model that knows which values a row holds and not which
key each belongs to. A smoke test: a score at chance after so few steps is no verdict.
"""

import torch
from torch.nn.functional import cross_entropy

from mixassay.mixers import Mixer
from mixassay.mixers.base_conv import BaseConv
from mixassay.model import Model
from mixassay.runners.conformance.outcome import Failed, Measured
from mixassay.runners.conformance.subject import Subject, changes
from mixassay.spec import ModelSpec
from mixassay.tasks.mqar import MQAR

TASK = MQAR(vocab_size=12, seq_len=8, num_kv=2, filler="zero")
B, LR = 32, 0.01


def check(subject: Subject) -> Measured:
    steps = 400 if subject.full else 60
    spec = ModelSpec(d_model=subject.d_model, n_layers=2, block="mamba")

    def make(layer: int) -> Mixer:
        return subject.build(dtype=torch.float32, nudge=0) if layer else BaseConv(subject.d_model)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model(spec, TASK.vocab_size, TASK.seq_len, make).to(subject.device)
    model.changes = changes
    optim = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    losses = []
    for step in range(steps):
        rows = TASK.rows(torch.arange(step * B, (step + 1) * B, device=subject.device), seed=0, split="train")
        loss = cross_entropy(model(rows.tokens, rows.positions).flatten(0, 1), rows.labels.flatten())
        optim.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optim.step()
        losses.append(loss.item())
        if losses[-1] != losses[-1]:
            raise Failed(f"the loss is not finite after {step} steps")
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    if not last < first:
        raise Failed(f"the loss rose from {first:.2f} to {last:.2f} in {steps} steps")
    with torch.no_grad():
        rows = TASK.rows(torch.arange(1000, device=subject.device), seed=0, split="valid")
        right = model(rows.tokens, rows.positions).argmax(-1) == rows.labels
    return {"accuracy": round(float(right.double().mean()), 3), "chance": 1 / TASK.num_kv, "steps": steps}
