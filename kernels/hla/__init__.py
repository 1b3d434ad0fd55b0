"""Higher-order linear attention: five operators of second and third order; the maths is in README.md."""

from mixassay.kernels.hla.op import (
    ahla,
    ahla_step,
    hla2,
    hla2_prefix,
    hla2_prefix_step,
    hla2_step,
    hla3,
    hla3_paper,
    hla3_paper_step,
    hla3_step,
)
from mixassay.kernels.hla.state import (
    AHLAState,
    HLA2PrefixState,
    HLA2State,
    HLA3PaperState,
    HLA3State,
    empty,
)

__all__ = [
    "AHLAState",
    "HLA2PrefixState",
    "HLA2State",
    "HLA3PaperState",
    "HLA3State",
    "ahla",
    "ahla_step",
    "empty",
    "hla2",
    "hla2_prefix",
    "hla2_prefix_step",
    "hla2_step",
    "hla3",
    "hla3_paper",
    "hla3_paper_step",
    "hla3_step",
]
