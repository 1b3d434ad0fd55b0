"""fla: the layers of flash-linear-attention (Yang and Zhang 2024) as they come, as mixers.

    mixer: {name: fla, layer: GatedLinearAttention, arguments: {num_heads: 2, expand_k: 0.5}}

Their kernels are written in Triton for a GPU. They cannot run under `torch.func.vmap`, so models train one after the
other. The version of flash-linear-attention is part of a run's key.
"""

from typing import Any

import torch
from fla import layers  # pyright: ignore[reportMissingImports]
from fla.models.utils import Cache  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.utils import _pytree as pytree

from mixassay.errors import UserError
from mixassay.mixers import Mixer, State, mixer


@mixer("fla")
class FlaLayer(Mixer):
    """layer       the name of a class in `fla.layers`
    arguments   its keyword arguments, `hidden_size` and `layer_idx` aside

    The state is what fla's own cache holds of the layer, and the number of tokens seen.
    """

    stacks = False

    def __init__(
        self,
        d_model: int,
        *,
        layer: str = "GatedLinearAttention",
        arguments: dict[str, bool | int | float | str | None] = {},  # noqa: B006 (read only, and the YAML's default)
    ) -> None:
        super().__init__()
        cls = getattr(layers, layer, None)
        if cls is None:
            raise UserError(f"fla.layers has no layer {layer}")
        self.d_model = d_model
        try:
            self.layer = cls(hidden_size=d_model, layer_idx=0, **arguments)
        except (TypeError, ValueError, AssertionError) as fault:
            raise UserError(f"{layer} cannot be made of d_model={d_model} and {arguments}: {fault}") from fault

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)[0]
        return y

    def init_state(self, batch: int) -> State:
        return {"seen": 0, "kept": {}}

    def prefill(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        cache: Any = Cache()
        if state["seen"]:  # a copy: some kernels write into the states of convolutions
            cache.update(layer_idx=0, offset=state["seen"], **pytree.tree_map_only(Tensor, torch.clone, state["kept"]))
        y, _, cache = self.layer(x, past_key_values=cache, use_cache=True)
        return y, {"seen": state["seen"] + x.shape[1], "kept": dict(cache[0])}

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, state = self.prefill(x.unsqueeze(1), state)
        return y.squeeze(1), state
