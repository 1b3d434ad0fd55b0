"""mixassay: an assay of sequence mixers. Same procedure, many samples, a measured amount with an error."""

import importlib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

try:
    __version__ = version("mixassay")
except PackageNotFoundError:  # a bare checkout on PYTHONPATH
    __version__ = "0+checkout"


def load(run: str | Path, results: str | Path = "results", plugins: Sequence[str] = ()) -> "nn.Module":
    """The trained model of a run that was made with `run.keep_weights: true`, on the CPU, in evaluation mode.

    `run` is a file of weights, or the start of a run's key (`mixassay show` finds it), looked for under `results`.
    `plugins` are those of the sweep (files or modules), where the model needs them: a file of weights runs no code.
    model(tokens int64 [B, T]) -> logits [B, T, vocab_size]; see `mixassay.model.Model`. Raises `UserError` where there
    are no such weights or they do not fit; warns if the code has changed since.
    """
    # By name: importing the package stays light, and what trains a run does not depend on what loads it.
    model: nn.Module = importlib.import_module("mixassay.runners.weights").load(run, results, plugins)
    return model
