"""Floating-point operations that training must spend on a token, and what share of a device's peak that is.

    6 for each weight of a matrix (2 forward, 4 backward), the tied embedding once, as the head
    softmax attention besides: 6 (K + V) / 2 for each head and token before it, T / 2 on average

What is computed again counts for nothing, and neither does what a linear mixer does with its state: at these sizes less
than a tenth of its matrices. So the share ("model FLOPs utilization", Chowdhery et al. 2022) is a low estimate.
"""

from torch import nn

from mixassay.spec import MixerSpec, ModelSpec

PEAK = {"H200": 989.4e12, "H100": 989.4e12, "B200": 2250e12, "A100": 311.9e12}
"""Dense bf16 operations a second by the maker's data sheet, by a word of the device's name. For H100 its SXM form."""


def per_token(model: nn.Module, spec: ModelSpec, mixer: MixerSpec, T: int) -> float:
    """Of a model in training on rows of T tokens."""
    weights = sum(p.numel() for name, p in model.named_parameters() if p.ndim >= 2 and not name.startswith("position."))
    layers = [spec.hybrid if spec.hybrid is not None and layer % 2 == 0 else mixer for layer in range(spec.n_layers)]
    return 6.0 * weights + sum(_pairs(layer, spec.d_model, T) for layer in layers)


def _pairs(mixer: MixerSpec, d_model: int, T: int) -> float:
    if mixer.name != "attention":
        return 0.0
    heads: int = mixer.args.get("heads", 1)
    width: int = heads * (mixer.args.get("head_dim") or d_model // heads)
    window: int = mixer.args.get("window") or T
    seen = T / 2 if window >= T else window * (1 - window / (2 * T))  # tokens before one, on average
    return 6.0 * 2 * width * seen


def peak(device: str) -> float | None:
    """Of a device by its name, None where it is not known."""
    return next((flops for word, flops in PEAK.items() if word in device), None)
