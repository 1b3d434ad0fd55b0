"""Sample sets by their content: the same recipe has the same address, and a set that was made once is read again.

A file `<address>.jsonl` holds one line about the set (its recipe, how many samples were asked for, sha256 of the rest)
and a line for each sample.
"""

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mixassay.errors import UserError
from mixassay.tasks.ruler import generate
from mixassay.tasks.ruler.compat.lm_eval import PublicLmEval
from mixassay.tasks.ruler.compat.ruler import PublicRuler
from mixassay.tasks.ruler.generate import Ruler
from mixassay.tasks.ruler.niah import NIAH
from mixassay.tasks.ruler.qa import QA
from mixassay.tasks.ruler.sample import Sample
from mixassay.tasks.ruler.sources import SHIPPED, Sources
from mixassay.tasks.ruler.table import TASKS, Compat
from mixassay.tasks.ruler.words import CommonWords
from mixassay.tokens import Counter

GENERATORS: dict[Compat | None, tuple[type[Ruler | PublicRuler | PublicLmEval], int]] = {
    None: (Ruler, generate.VERSION),
    "ruler": (PublicRuler, 1),
    "lm-eval": (PublicLmEval, 1),
}
"""Generator and version, which is raised whenever the same arguments give another sample."""


@dataclass(frozen=True)
class SampleSet:
    """compat: whose generator, ours if None. seed: the generator's own default if None.

    Raises UserError for an unknown task or compat, and a length below 256.
    """

    task: str
    length: int
    tokenizer: Counter
    sources: Sources = SHIPPED
    seed: int | None = None
    compat: Compat | None = None

    def __post_init__(self) -> None:
        if self.compat not in GENERATORS:
            raise UserError(f'ruler: compat must be "ruler", "lm-eval" or left out, got "{self.compat}"')
        Ruler(self.task, self.length, self.tokenizer)  # checks both

    def samples(self, n: int) -> list[Sample]:
        """The first n samples, made now. lm-eval's generator drops those that do not fit."""
        return list(self._generator.samples(n))

    @property
    def _generator(self) -> Ruler | PublicRuler | PublicLmEval:
        make = GENERATORS[self.compat][0]
        made = make(self.task, self.length, self.tokenizer, self.sources)
        return made if self.seed is None else replace(made, seed=self.seed)

    def recipe(self) -> dict[str, Any]:
        """All that decides the samples: for a result's record."""
        return {
            "generator": self.compat or "mixassay",
            "version": GENERATORS[self.compat][1],
            "task": self.task,
            "length": self.length,
            "seed": self._generator.seed,
            "tokenizer": self.tokenizer.identity,
            "sources": self._hashes(),
        }

    def _hashes(self) -> dict[str, str]:
        """sha256 of every source that the task draws from, by name."""
        task, hashes = TASKS[self.task], dict[str, str]()
        if isinstance(task, NIAH) and task.haystack == "essay":
            prose = self.sources.prose()
            hashes[prose.name] = prose.sha256
        if isinstance(task, CommonWords) or (isinstance(task, NIAH) and task.key == "words"):
            hashes["words"] = self.sources.words().sha256
        if isinstance(task, QA):
            questions = self.sources.questions(task.data)
            hashes[questions.name] = questions.sha256
        return hashes

    @property
    def address(self) -> str:
        """sha256 of the recipe; the file names of its sources, which decide nothing, left out."""
        recipe = self.recipe()
        return _sha256(json.dumps({**recipe, "sources": list(recipe["sources"].values())}, sort_keys=True))

    def cached(self, n: int, folder: Path) -> list[Sample]:
        """`samples(n)`, read from the folder if it has them and written there if not.

        Raises UserError for a file that was changed after it was written.
        """
        file = folder / f"{self.address}.jsonl"
        if file.exists():
            asked, samples = read(file)
            if asked >= n:
                return [sample for sample in samples if sample.index < n]
        samples = self.samples(n)
        write(file, self.recipe(), n, samples)
        return samples


def write(file: Path, recipe: dict[str, Any], asked: int, samples: list[Sample]) -> None:
    """Whole or not at all."""
    body = "".join(json.dumps(asdict(sample)) + "\n" for sample in samples)
    head = json.dumps({"recipe": recipe, "asked": asked, "sha256": _sha256(body)})
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(head + "\n" + body)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


def read(file: Path) -> tuple[int, list[Sample]]:
    """(how many samples were asked for, the samples)."""
    head, _, body = file.read_text(encoding="utf-8").partition("\n")
    try:
        about = json.loads(head)
    except ValueError:
        about = {}
    if about.get("sha256") != _sha256(body):
        raise UserError(f"ruler: {file} was changed after it was written; delete it, and it will be made anew")
    return about["asked"], [sample(json.loads(line)) for line in body.splitlines()]


def sample(fields: dict[str, Any]) -> Sample:
    """From JSON, whose lists are tuples here."""
    typed: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return Sample(**typed)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
