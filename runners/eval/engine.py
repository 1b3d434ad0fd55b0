"""A set of questions put to a model: by lm-eval's engine, or by our own loop where lm-eval is not installed.

Both give the same prompts to the same model and score its answers by the set's own function, so they agree to the bit.
lm-eval renders, batches and logs; that it changed no prompt and means what we mean is checked with every set.
"""

import contextlib
import io
import logging
import math
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from mixassay.runners.eval.question import Answer, Set
from mixassay.runners.extras import need

METRIC = "score"


def ask(lm: Any, asked: Set) -> list[Answer]:
    """`lm` is a model of lm-eval."""
    task = task_of(asked)
    samples, results = evaluated(lm, {asked.name: task})
    logged = sorted(samples[asked.name], key=lambda sample: sample["doc_id"])
    for question, sample in zip(asked.questions, logged, strict=True):
        if sample["arguments"][0][0] != question.prompt:
            raise RuntimeError(f"{asked.name}: lm-eval asked with another prompt than the set's")
    answers = [Answer(sample["filtered_resps"][0], sample[METRIC]) for sample in logged]
    told, mean = results[asked.name][f"{METRIC},none"], fmean(answer.score for answer in answers)
    if not math.isclose(told, mean, rel_tol=1e-9, abs_tol=1e-12):
        raise RuntimeError(f"{asked.name}: lm-eval says {told}, the samples' mean is {mean}")
    return answers


def ask_directly(language: Any, asked: Set) -> list[Answer]:
    """`language` is a `Language`; lm-eval is not needed."""
    from mixassay.runners.eval.language import Wanted

    encode = language.tokenizer.encode
    wanted = [Wanted(tuple(encode(q.prompt)), q.new_tokens, q.stop) for q in asked.questions]
    texts = language.answers(wanted)
    return [Answer(text, asked.score(q, text)) for q, text in zip(asked.questions, texts, strict=True)]


def task_of(asked: Set) -> Any:
    """The set as a task of lm-eval."""
    tasks, datasets = need("lm_eval.api.task", "lm", "mixassay eval"), need("datasets", "lm", "mixassay eval")
    rows = [{"number": number, "prompt": question.prompt} for number, question in enumerate(asked.questions)]
    first = asked.questions[0]

    def score(doc: dict[str, Any], texts: list[str]) -> dict[str, float]:
        return {METRIC: asked.score(asked.questions[doc["number"]], texts[0])}

    config = {
        "task": asked.name,
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": lambda doc: doc["prompt"],
        "doc_to_target": lambda doc: ", ".join(asked.questions[doc["number"]].answers),
        "generation_kwargs": {"until": list(first.stop), "max_gen_toks": first.new_tokens, "do_sample": False},
        "process_results": score,
        "metric_list": [{"metric": METRIC, "aggregation": "mean", "higher_is_better": True}],
        "num_fewshot": 0,
        "metadata": {"version": asked.version},
    }
    with quiet():
        return tasks.ConfigurableTask(config=config)


def evaluated(lm: Any, tasks: dict[str, Any], limit: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Samples and results of tasks of lm-eval, by name. Errors of means are ours, so nothing is bootstrapped."""
    evaluator = need("lm_eval.evaluator", "lm", "mixassay eval")
    with quiet():
        found = evaluator.evaluate(lm, {"tasks": tasks, "groups": {}}, limit=limit, bootstrap_iters=0)
    return found["samples"], found["results"]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """lm-eval and datasets say nothing but errors: no advice, no bars."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
