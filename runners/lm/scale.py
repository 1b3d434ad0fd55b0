"""What a long run would take: operations, memory and time, from a share of the device's peak that was measured.

    python -P -m mixassay.runners.lm.scale [MIXER=MFU ...]

prints the table of docs/scale.md for the models of the log-linear paper (Guo et al. 2025: 50B tokens, rows of 16384).
Their sizes are d_model 1536, 21 layers, an MLP of 4096, 32000 words and a head of its own; that gives the paper's
numbers of parameters, 693M, 802M and 825M. `mfu` in the records of `configs/lm` is what to fill in, until runs of this
size have records of their own.
"""

import sys
from dataclasses import dataclass

import torch

from mixassay.errors import UserError
from mixassay.model import build
from mixassay.runners.lm import work
from mixassay.spec import MixerSpec, ModelSpec

TOKENS, T, WORDS = 50e9, 16384, 32000
MODEL = ModelSpec(d_model=1536, n_layers=21, block="swiglu")
MIXERS = {
    "attention": {"heads": 24, "rope": True},
    "mamba2": {"d_state": 128},
    "log_linear_mamba2": {"d_state": 128, "levels": 15},
    "dla_mamba2": {"d_state": 128},
}
GUESS = 0.25
"""Share of the peak where nothing was measured."""

BYTES_OF_A_WEIGHT = 16
"""Parameter, gradient and AdamW's two moments in float32, all on every rank."""


@dataclass(frozen=True)
class Need:
    params: int
    flops: float  # of the whole run
    bytes: int  # on every GPU, activations aside

    def seconds(self, gpus: int, mfu: float, device: str = "H200") -> float:
        """Where no GPU waits for another."""
        peak = work.peak(device)
        assert peak is not None
        return self.flops / (gpus * mfu * peak)


def need(mixer: MixerSpec, model: ModelSpec = MODEL, words: int = WORDS, length: int = T) -> Need:
    with torch.device("meta"):
        made = build(model, mixer, words, length)
    params = sum(p.numel() for p in made.parameters()) + words * model.d_model  # the head, which ours ties
    return Need(params, TOKENS * work.per_token(made, model, mixer, length), BYTES_OF_A_WEIGHT * params)


def table(mfu: dict[str, float]) -> str:
    lines = [
        "| mixer | parameters | FLOP | weights, gradients, moments | MFU | 8 H200 | 64 H200 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, args in MIXERS.items():
        found, share = need(MixerSpec.model_validate({"name": name, **args})), mfu.get(name, GUESS)
        said = f"{100 * share:.0f} %" + ("" if name in mfu else ", guessed")
        times = " | ".join(f"{found.seconds(gpus, share) / 3600:.1f} h" for gpus in (8, 64))
        row = f"{name} | {found.params / 1e6:.0f}M | {found.flops:.1e} | {found.bytes / 1e9:.1f} GB | {said} | {times}"
        lines.append(f"| {row} |")
    return "\n".join(lines)


def measured(words: list[str]) -> dict[str, float]:
    """`mamba2=0.31` for each word."""
    found = {}
    for word in words:
        name, _, share = word.partition("=")
        try:
            found[name] = float(share)
        except ValueError:
            raise UserError(f"{word} should be MIXER=MFU, such as mamba2=0.31") from None
        if name not in MIXERS or not 0 < found[name] < 1:
            raise UserError(f"{word}: MIXER is one of {', '.join(MIXERS)}, MFU between 0 and 1")
    return found


if __name__ == "__main__":
    print(table(measured(sys.argv[1:])))
