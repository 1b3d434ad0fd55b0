"""The gated delta rule; the maths is in README.md."""

from mixassay.kernels.gated_delta_rule.op import gated_delta_rule, gated_delta_rule_step

__all__ = ["gated_delta_rule", "gated_delta_rule_step"]
