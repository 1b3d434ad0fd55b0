"""Compile for sm_90 what a call would launch, on a machine without a GPU: registers, spills, shared memory, wgmma.

    python -m tests.kernels.hopper linear_attention:64 gated_delta_rule:128

prints a line of JSON for each kernel that an operator with bfloat16 heads of this width launches; `dla.delta:16:walk`
of those whose name begins so. Without a width, the names of the kernels for all kinds of arguments, or which arguments
they do not take. Not in a process that interprets Triton.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from inspect import signature
from itertools import product
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
}


class Compiled(NamedTuple):
    kernel: str
    warps: int
    registers: int
    spilled: int  # bytes a thread keeps in local memory
    shared: int  # bytes
    wgmma: int  # instructions
    wgmma_of_8: int  # of these, with 8 columns
    mma: int  # the older ones
    transposed_products: int  # `tt.trans` of a tensor in the layout of a product
    guarded_reductions: int  # REDUX instructions under a predicate
    ttgir: str


lowered: set[tuple[Any, ...]] = set()  # what this process has understood: most kernels do not see most options


def compiled(call: Callable[[], Any], only: str = "") -> list[Compiled]:
    """Run `call` with every kernel launch replaced by its compilation; `only`: of kernels whose name begins so. Tensors
    may live on the meta device."""

    def compile(kernel: Any, *given: Any) -> list[Compiled]:
        return [_compile(kernel, *given)] if kernel.__name__.startswith(only) else []

    return [one for found in _instead(compile, call) for one in found]


def understood(call: Callable[[], Any]) -> list[str]:
    """As `compiled`, as far as Triton's own language goes: names of kernels whose source fits their arguments."""
    backend: Any = make_backend(HOPPER)  # a base class that says less than its children do

    def lower(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> str:
        source, settings = _source(kernel, args, options)
        name, key = str(kernel.__name__), (source.hash(), *sorted(settings.items()))
        if key in lowered:
            return name
        chosen, context = backend.parse_options(dict(settings)), ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        generators, modules = backend.get_codegen_implementation(chosen), backend.get_module_map()
        source.make_ir(HOPPER, chosen, generators, modules, context)
        lowered.add(key)
        return name

    return _instead(lower, call)


def _instead(compile: Callable[..., Any], call: Callable[[], Any]) -> list[Any]:
    found: list[Any] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append(compile(self, args, options))

    with ExitStack() as stack:
        stack.enter_context(patch.object(JITFunction, "run", run))
        call()
    return found


def _source(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[ASTSource, dict[str, Any]]:
    settings = {name: options.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in options}
    values = dict(zip(kernel.arg_names, args, strict=False)) | options
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        special = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or (special and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes), settings


def _compile(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Compiled:
    source, settings = _source(kernel, args, options)
    result = triton.compile(source, target=HOPPER, options=settings)
    ttgir = result.asm["ttgir"]
    usage = _usage(result.asm["cubin"])
    # What ptxas makes REDUX of; to disassemble takes longer than to compile.
    sass = _cuobjdump(result.asm["cubin"], "--dump-sass") if "redux.sync" in result.asm["ptx"] else ""
    return Compiled(
        kernel.__name__,
        settings.get("num_warps", 4),
        registers=usage["REG"],
        spilled=usage["LOCAL"] + usage["STACK"],
        shared=result.metadata.shared,
        wgmma=len(re.findall(r"wgmma\.mma_async", result.asm["ptx"])),
        wgmma_of_8=len(re.findall(r"wgmma\.mma_async\S*\.m64n8k", result.asm["ptx"])),
        mma=len(re.findall(r"mma\.sync", result.asm["ptx"])),
        transposed_products=len(re.findall(r"tt\.trans .* : tensor<[^>]*, #mma\d*> ->", ttgir)),
        guarded_reductions=len(re.findall(r"@!?U?P\d+ +REDUX", sass)),
        ttgir=ttgir,
    )


def _usage(cubin: bytes) -> dict[str, int]:
    text = _cuobjdump(cubin, "--dump-resource-usage")
    return {key: int(value) for key, value in re.findall(r"(REG|LOCAL|STACK|SHARED):(\d+)", text)}


@cache
def _cuobjdump(cubin: bytes, what: str) -> str:
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([CUOBJDUMP, what, file.name], capture_output=True, text=True, check=True).stdout


def operator(
    name: str, width: int, T: int = 4096, *, decay: bool = True, state: bool = False, packed: bool = False
) -> Callable[[], Any]:
    """Forward and backward of mixassay.kernels.`name` for K = V = `width`: with log decays, with initial and final
    states where the operator's kernels know any, with packed sequences. 4096 tokens are cut into segments."""
    if name == "dla.schedule":
        return schedule(width)
    if name in ("linear_attention.short", "log_linear_attention.short"):
        return short(name.removesuffix(".short"), width)
    module = import_module(f"mixassay.kernels.{name}_triton" if "." in name else f"mixassay.kernels.{name}.triton")
    if name == "linear_cross_entropy":
        return head(module, width)
    B, H, levels = 1 if packed else 2, 8, 13
    tensor = lambda *shape, dtype=torch.bfloat16: torch.empty(B, T, H, *shape, dtype=dtype, device="meta")  # noqa: E731
    S = torch.empty(B, H, width, width, device="meta") if state else None
    given: dict[str, Any] = {"scale": 0.1, "initial_state": S, "dfinal": S, "output_final_state": state}
    given["cu_seqlens"] = torch.empty(2, dtype=torch.int64, device="meta") if packed else None
    given |= {wide: tensor(width) for wide in ("q", "k", "v", "do")}
    given |= {narrow: tensor(dtype=torch.float32) for narrow in ("beta", "log_decay")}
    given |= {"level_scale": tensor(levels, dtype=torch.float32)} | ({} if decay else {"log_decay": None})
    if name in ("dla", "dla.pairs", "dla.delta"):
        given |= {"rank_scale": tensor(30, dtype=torch.float32), "starts": tensor(30, dtype=torch.int32)}
        given |= {"until": tensor(dtype=torch.int32), "gated": True}
    if name == "hla":  # the one with most terms
        given |= {"inner": given["log_decay"], "outer": tensor(dtype=torch.float32) if decay else None}
        given |= {"initial": module.States(S, S, S), "dfinal": module.States(S, S, S)}
        given |= {"ridge": 0.0, "metric": True, "values": True}

    def call() -> None:
        take = lambda f: {n: given[n] for n in signature(f).parameters if n in given}  # noqa: E731
        results = module.forward(**take(module.forward))
        results = results if isinstance(results, tuple) else (results,)
        between = [n for n in signature(module.backward).parameters if n not in given | {"how": 0, "length": 0}]
        module.backward(
            **take(module.backward), **dict(zip(between, results[len(results) - len(between) :], strict=True))
        )

    return call


def head(module: Any, width: int) -> Callable[[], Any]:
    """A stack of models with 8192 words, under autocast."""
    tensor = lambda *shape, dtype=torch.float32: torch.empty(2, *shape, dtype=dtype, device="meta")  # noqa: E731
    h, weight, labels, lse = tensor(4096, width), tensor(8192, width), tensor(4096, dtype=torch.int64), tensor(4096)

    def call() -> None:
        for gradient in (True, False):
            module.rows(h, weight.half(), labels, -100, gradient)
        module.words(h.half(), weight, labels, lse, lse, -100)

    return call


def schedule(width: int) -> Callable[[], Any]:
    """Of keys half as wide as values, as Gated DeltaNet has them, with a decay: the walk, chunks in blocks, slots."""
    dla = "mixassay.kernels.dla"
    starts, slots = import_module(f"{dla}.boundaries_triton"), import_module(f"{dla}.slots_triton")
    tensor = lambda *shape, dtype=torch.bfloat16: torch.empty(2, 256, 2, *shape, dtype=dtype, device="meta")  # noqa: E731
    k, v, g = tensor(width // 2), tensor(width), tensor(dtype=torch.float32)

    def call() -> None:
        for chunk_size in (0, None):
            score, boundary = starts.scores(k, v, g[:, 0], g, "memory", chunk_size, block=128)
        slots.fill(boundary, score, None, None, 30, "density")

    return call


def short(name: str, width: int) -> Callable[[], Any]:
    """Rows of 256 tokens, of eight heads that share q and k, as in Mamba-2, and of eight that do not."""
    module = import_module(f"mixassay.kernels.{name}.short_triton")
    tensor = lambda *shape, dtype=torch.bfloat16: torch.empty(2, 256, *shape, dtype=dtype, device="meta")  # noqa: E731
    v, g = tensor(8, width), tensor(8, dtype=torch.float32)
    weights = [tensor(8, 9, dtype=torch.float32)] if name.startswith("log_linear") else []

    def call() -> None:
        for groups in (1, 8):
            q = tensor(groups, width)
            module.forward(q, q, v, *weights, g, 0.1)
            module.backward(q, q, v, *weights, g, 0.1, v)

    return call


def options(name: str) -> None:
    """Short and long with every combination of any two of `operator`'s options."""
    for long, decay, state, packed in product((False, True), repeat=4):
        if (long + decay + state + packed) % 2:
            continue
        chosen = {"T": 4096 if long else 20, "decay": decay, "state": state, "packed": packed}
        try:
            kernels = understood(operator(name, 64, **chosen))
        except Exception as error:
            sys.exit(f"{name}, {chosen}: {error}")
        print(json.dumps({"operator": name, "kernels": kernels} | chosen), flush=True)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        name, width, only, *_ = [*argument.split(":"), "", ""]
        if not width:
            options(name)
            continue
        for kernel in compiled(operator(name, int(width)), only):
            fields = kernel._asdict()
            del fields["ttgir"]
            print(json.dumps({"operator": name, "width": int(width)} | fields), flush=True)
