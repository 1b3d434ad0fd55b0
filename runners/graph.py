"""A step whose launches a GPU replays: the first few run as written, then one CUDA graph for every shape.

A step of small models is hundreds of launches, each cheaper to run than to launch. A graph launches them all at once
and runs the same kernels on the same memory, so its numbers are those of the step as written.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WARM = 3
"""Steps of a shape that run as written: kernels are compiled, workspaces allocated, tables cached."""

_log = logging.getLogger(__name__)


class Replay:
    """Calls `step(*inputs)`, which may change tensors in place and must not wait for the device.

    Those tensors must be the same ones in every call: after replacing any, `forget`. What it returns holds until the
    next call. A step that cannot be captured, since it waits for the device after all, goes on running as written, and
    the log says so.
    """

    def __init__(self, step: Callable[..., Any], device: str) -> None:
        self.step, self.on = step, torch.device(device).type == "cuda"
        self.forget()

    def forget(self) -> None:
        self.shapes: dict[Any, _Shape] = {}
        self.pool: Any = None

    def __call__(self, *inputs: Tensor | None, taken: Callable[[], None] = lambda: None) -> Any:
        """`taken` is called as soon as the inputs may be overwritten, by whatever waits for the current stream."""
        if not self.on:
            result = self.step(*inputs)
            taken()
            return result
        key = tuple(None if x is None else (x.shape, x.dtype) for x in inputs)
        shape = self.shapes.get(key)
        if shape is None:
            shape = self.shapes[key] = _Shape([None if x is None else x.clone() for x in inputs])
        for kept, x in zip(shape.inputs, inputs, strict=True):
            if kept is not None and x is not None:
                kept.copy_(x)
        taken()
        if shape.seen == WARM:
            self._capture(shape)
        shape.seen += 1
        if shape.graph is None:
            return self.step(*shape.inputs)
        shape.graph.replay()
        return shape.result

    def _capture(self, shape: "_Shape") -> None:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()  # what the steps as written left behind
        try:
            # what other threads do meanwhile, such as pinning the next batch, is none of its business
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                shape.result = self.step(*shape.inputs)
        except RuntimeError as error:
            self.on = False
            _log.warning("this step cannot be captured in a CUDA graph and runs as written: %s", error)
            return
        self.pool = self.pool or graph.pool()
        shape.graph = graph


class _Shape:
    def __init__(self, inputs: list[Tensor | None]) -> None:
        self.inputs, self.seen = inputs, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Any = None
