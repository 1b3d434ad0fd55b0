"""Trained weights, of runs made with `run.keep_weights: true`: one safetensors file each, `mixassay.load` reads it.

    results/<suite>/.weights/<key>.safetensors

Tensors have the names they have in the model; the header says which run they are of. Git does not see the folder.
Beside the weights of a language model stands <key>.tokenizer.json, unless its tokens are bytes.
"""

import json
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mixassay import corpus, draws, plugins
from mixassay.errors import UserError
from mixassay.mixers import mixer
from mixassay.model import Model, build
from mixassay.provenance import source_of
from mixassay.runners import checkpoint
from mixassay.runners.stream import changes, decodes
from mixassay.spec import RunSpec, Sections

HEADER = "mixassay"
"""The entry of the file's metadata that holds ours, as JSON."""


def place(results: Path, suite: str, key: str) -> Path:
    return results / suite / ".weights" / f"{key}.safetensors"


def save(results: Path, spec: RunSpec, key: str, source: str, tensors: dict[str, Tensor]) -> None:
    """Keep a run's parameters and buffers, by their names in the model; the file is there whole or not at all."""
    path = place(results, spec.suite, key)
    folder = path.parent
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    about = {"key": key, "cell": spec.cell, "seed": spec.seed, "config": spec.config(), "source": source}
    if (tokenizer := corpus.tokenizer_file(spec.task)) is not None:
        shutil.copyfile(tokenizer, folder / f"{key}.tokenizer.json")
    checkpoint.write(path, tensors, {HEADER: json.dumps(about)})


def load(run: str | Path, results: str | Path = "results", plugin_names: Sequence[str] = ()) -> Model:
    """See `mixassay.load`."""
    path = find(run, Path(results))
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(HEADER)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    except (SafetensorError, OSError) as problem:
        raise UserError(f"{path} cannot be read as safetensors: {problem}") from problem
    if header is None:
        raise UserError(f"{path} was not written by `mixassay run`: its header does not say which run it is of")
    about: dict[str, Any] = json.loads(header)
    plugins.load(plugin_names)
    for part in (about["config"]["mixer"], about["config"]["model"]["hybrid"]):
        if part is not None and part["name"] not in mixer.names():
            raise UserError(
                f'{path}: its mixer "{part["name"]}" is not registered; name the file or module that registers it '
                "(--plugin FILE, in Python plugins=[...])"
            )
    model = rebuilt(about, tensors, path)
    _compare_code(about, plugin_names)
    return model


def find(run: str | Path, results: Path) -> Path:
    """A file as given, or the weights of the run whose key begins so."""
    if Path(run).is_file():
        return Path(run)
    if len(str(run)) < 4 or not str(run).isalnum():
        raise UserError(f"{run}: no such file; give one, or at least 4 letters of a run's key")
    found = sorted(results.glob(f"*/.weights/{run}*.safetensors"))
    if len(found) > 1:
        raise UserError(f"{run}: {len(found)} runs have a key that begins so: {', '.join(p.stem for p in found[:5])}")
    if not found:
        raise UserError(
            f"{run}: no weights of such a run under {results}; they are kept by runs that train with"
            " run.keep_weights=true (--mode force trains again what has a record)"
        )
    return found[0]


def rebuilt(about: dict[str, Any], tensors: dict[str, Tensor], path: Path) -> Model:
    """The run's model, built as it was for training, then given the weights."""
    spec = Sections.model_validate_json(json.dumps(about["config"]))
    words, longest = (tensors[f"{name}.weight"].shape[0] if f"{name}.weight" in tensors else 1 for name in EMBEDDINGS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draws.derive(about["seed"], "init"))
        model = build(spec.model, spec.mixer, words, longest, decodes(spec.task))
    model.changes = changes(spec.task)
    model.to(torch.float64 if spec.train.precision == "fp64" else torch.float32)
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    wanted, found = ({name: list(t.shape) for name, t in some.items()} for some in (own, tensors))
    if wanted != found:
        differing = sorted(name for name in wanted | found if wanted.get(name) != found.get(name))
        name = differing[0]
        raise UserError(
            f"{path} does not fit the model that this code builds: {len(differing)} tensors differ, {name} is"
            f" {found.get(name, 'missing')} in the file and {wanted.get(name, 'unknown')} here"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    return model.eval()


EMBEDDINGS = ("embedding", "position")


def _compare_code(about: dict[str, Any], plugin_names: Sequence[str]) -> None:
    spec = Sections.model_validate_json(json.dumps(about["config"]))
    if source_of(spec, plugins.files(plugin_names)) != about["source"]:
        warnings.warn(
            f"run {about['key']} was trained by other code than this (source {about['source']}): its weights are as"
            " they were, what the model computes with them may have changed",
            stacklevel=4,
        )
