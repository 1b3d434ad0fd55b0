"""The prompts of LongBench v1: the templates of the installed lm-eval, put right where they differ from the authors'.

lm-eval's templates lose white space in six sets. For a model that is near its limits this moves scores: it then begins
its answer in the question's line. What is wrong is kept here as data, and of each right template its hash, so that
another release of lm-eval cannot change a prompt unnoticed. The forms of LongBench-E have the same templates.

A template has the places {{context}} and {{question}}.
"""

import hashlib
import re
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from mixassay.errors import UserError
from mixassay.runners.longbench.rows import Row
from mixassay.runners.longbench.sets import find

CORRECTIONS = {
    "triviaqa": ("{{context}}\n{{question}}", "{{context}}\n\n{{question}}"),
    "samsum": ("{{context}}\n{{question}}", "{{context}}\n\n{{question}}"),
    "passage_count": ("The final answer is:", "The final answer is: "),
    "passage_retrieval_en": ("The answer is:", "The answer is: "),
    "lcc": ("Next line of code:", "Next line of code:\n"),
    "repobench-p": ("Next line of code:", "Next line of code:\n"),
}
"""Set -> what lm-eval's template has, and what the authors' has in its place."""

HASHES = {
    "narrativeqa": "f715a4e4720fbf86",
    "qasper": "20bfb86ba8784ca7",
    "multifieldqa_en": "db6e0c1a86852552",
    "multifieldqa_zh": "52a4c38719643415",
    "hotpotqa": "c72f49ff6d0034ad",
    "2wikimqa": "c72f49ff6d0034ad",
    "musique": "c72f49ff6d0034ad",
    "dureader": "4d2dc0fb90de81c5",
    "gov_report": "e4e4159a4d923ef5",
    "qmsum": "0eca1bfd34c6331b",
    "multi_news": "e729eda84ccf4936",
    "vcsum": "f44becb06365a1b1",
    "trec": "6996b8cabb29bc13",
    "triviaqa": "f9c2b36a710a0277",
    "samsum": "27654a31b056ffb1",
    "lsht": "2a057c99cfaa1fb3",
    "passage_count": "9cb5ce4fcd51bdbb",
    "passage_retrieval_en": "32396b999ae44fc1",
    "passage_retrieval_zh": "ddf89344c63e7804",
    "lcc": "86a317fc8d78ed30",
    "repobench-p": "427ee391ce376020",
}
"""Set -> the first 16 hexadecimal digits of the SHA-256 of its right template."""


def prompt(row: Row) -> str:
    """The prompt of a row, before any chat template and whole: see truncation.py."""
    return fill(template(row.dataset.removesuffix("_e")), {"context": row.context, "question": row.input})


@cache
def template(name: str) -> str:
    """The template of a set. Raises `UserError` where lm-eval is not installed, or another template is."""
    find(name)
    return right(f"longbench/{name}.yaml", CORRECTIONS.get(name), HASHES[name])


def right(file: str, correction: tuple[str, str] | None, digest: str) -> str:
    """The template in one of lm-eval's task files after its correction, where it needs one."""
    found = installed(file)
    forms = [found, *([found.replace(*correction)] if correction else [])]
    for form in forms:
        if hashed(form) == digest:
            return form
    raise UserError(
        f"the template in {file} of lm-eval {version('lm-eval')} is neither LongBench's nor the one that is corrected "
        "here: install the release of lm-eval in constraints.txt"
    )


def installed(file: str) -> str:
    """The template in a task file of lm-eval, as it is."""
    return str(task_file(file)["doc_to_text"])


def task_file(file: str) -> dict[str, Any]:
    """A task file of lm-eval, which is not imported for it: that would take seconds."""
    spec = find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("the prompts of LongBench need lm-eval: pip install 'mixassay[lm]'")
    path = Path(spec.submodule_search_locations[0], "tasks", file)
    if not path.is_file():
        raise UserError(f"lm-eval {version('lm-eval')} has no {file}: install the release in constraints.txt")
    return dict(yaml.load(path.read_text(encoding="utf-8"), _TaskFile))


def fill(text: str, values: dict[str, str]) -> str:
    """Each {{place}} by its value. Values are not looked into: a context may hold braces."""
    return re.sub(r"\{\{(.+?)\}\}", lambda place: values[place[1]], text)


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _TaskFile(yaml.SafeLoader):
    """lm-eval's YAML names functions by a tag; here they are texts."""


def _name(loader: yaml.SafeLoader, node: Any) -> str:
    return str(loader.construct_scalar(node))


_TaskFile.add_constructor("!function", _name)
