"""Layer norms, RMS norms with or without a gate, and unit vectors."""

from mixassay.kernels.norm.op import l2_norm, layer_norm, rms_norm

__all__ = ["l2_norm", "layer_norm", "rms_norm"]
