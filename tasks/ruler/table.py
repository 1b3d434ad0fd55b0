"""The thirteen tasks of RULER (Hsieh et al. 2024, arXiv 2404.06654) as data."""

from typing import Literal

from mixassay.tasks.ruler.niah import NIAH
from mixassay.tasks.ruler.qa import QA
from mixassay.tasks.ruler.variables import VariableTracking
from mixassay.tasks.ruler.words import CommonWords, FrequentWords

Family = NIAH | VariableTracking | CommonWords | FrequentWords | QA

Compat = Literal["ruler", "lm-eval"]
"""A public generator to be like, where ours is not wanted: see `compat`."""

TASKS: dict[str, Family] = {
    "niah_single_1": NIAH("noise"),
    "niah_single_2": NIAH("essay"),
    "niah_single_3": NIAH("essay", value="uuids"),
    "niah_multikey_1": NIAH("essay", keys=4),
    "niah_multikey_2": NIAH("needles"),
    "niah_multikey_3": NIAH("needles", key="uuids", value="uuids"),
    "niah_multivalue": NIAH("essay", values=4),
    "niah_multiquery": NIAH("essay", keys=4, queries=4),
    "vt": VariableTracking(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
    "qa_1": QA("squad"),
    "qa_2": QA("hotpotqa"),
}
