"""The log-linear gated delta rule; the maths is in README.md."""

from mixassay.kernels.log_linear_gated_delta_rule.op import (
    log_linear_gated_delta_rule,
    log_linear_gated_delta_rule_step,
)

__all__ = ["log_linear_gated_delta_rule", "log_linear_gated_delta_rule_step"]
