"""Functions of common.yml. That lm-eval loads this module makes `--model mixassay` known to it, too."""

import os
from pathlib import Path
from typing import Any

from mixassay import tokens
from mixassay.errors import UserError
from mixassay.runners import weights
from mixassay.runners.eval import adapter, ruler, suites
from mixassay.runners.eval.opened import header, tokenizer_of
from mixassay.runners.extras import need
from mixassay.tasks.ruler import scores
from mixassay.tokens import Tokenizer

MODEL = adapter.NAME


def samples(ruler_task: str, **metadata: Any) -> dict[str, Any]:
    """`metadata`: of --metadata (length, samples, seed, data) and of --model_args, which tell the tokenizer."""
    data = Path(metadata["data"]) if "data" in metadata else None
    made = ruler.make(
        ruler_task,
        int(metadata.get("length", 4096)),
        int(metadata.get("seed", 42)),
        int(metadata.get("samples", suites.SAMPLES)),
        tokenizer(metadata),
        suites.sources(data, ()),
        Path(metadata.get("cache", Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "mixassay/ruler")),
    )
    rows = [{"task": ruler_task, "prompt": q.prompt, "answers": list(q.answers)} for q in made.questions]
    return {"test": need("datasets", "lm", "RULER in lm-eval").Dataset.from_list(rows)}


def tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    if "tokenizer" in metadata:
        return tokens.load(metadata["tokenizer"])
    if "run" in metadata:
        path = weights.find(str(metadata["run"]), Path(metadata.get("results", "results")))
        return tokenizer_of(path, header(path))
    if "pretrained" in metadata:
        return tokens.load(metadata["pretrained"])
    raise UserError('RULER samples are made for a tokenizer: give --metadata \'{"tokenizer": "bytes or a path"}\'')


def score(doc: dict[str, Any], texts: list[str]) -> dict[str, float]:
    return {"score": scores.score(doc["task"], texts[0], doc["answers"])}
