"""A mixer owns its initialisation: the model around it and the stack that trains it leave every parameter as built."""

import torch
from torch import Tensor

from mixassay.mixers import Mixer
from mixassay.model import Model
from mixassay.runners.conformance.outcome import Failed, Measured
from mixassay.runners.conformance.subject import Subject
from mixassay.runners.stack import Stack
from mixassay.spec import ModelSpec


def check(subject: Subject) -> Measured:
    built: list[dict[str, Tensor]] = []

    def make(layer: int) -> Mixer:
        made = subject.build(seed=layer, dtype=torch.float32, nudge=0)
        built.append({name: p.detach().clone() for name, p in made.named_parameters()})
        return made

    spec = ModelSpec(d_model=subject.d_model, n_layers=2, block="swiglu", positions="learned")
    model = Model(spec, 8, 8, make).to(subject.device)
    trained = Stack([model], mode="loop").weights(0)
    for layer, parameters in enumerate(built):
        for name, p in parameters.items():
            if not torch.equal(trained[f"blocks.{layer}.mixer.{name}"], p):
                raise Failed(f"parameter {name} of layer {layer} is not as the mixer made it")
    return {}
