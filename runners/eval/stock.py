"""lm-eval's own tasks of common sense, from files on the disk.

Templates, continuations and scores are lm-eval's, read from its task files; only the rows come from DIR/TASK.jsonl. The
eight sets: the papers name eight and print some; LAMBADA, PIQA, ARC and CommonsenseQA are among theirs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mixassay.errors import UserError
from mixassay.runners.eval.canary import Refused, judge
from mixassay.runners.eval.engine import evaluated, quiet
from mixassay.runners.eval.question import Answer, Question, Set, hashed
from mixassay.runners.extras import need


@dataclass(frozen=True)
class Stock:
    """A task file of lm-eval, the fields that its rows need, where they are published, and the metric to print."""

    file: str
    fields: tuple[str, ...]
    published: str
    metric: str = "acc"


TASKS: Mapping[str, Stock] = {
    "lambada_openai": Stock("lambada/lambada_openai.yaml", ("text",), "EleutherAI/lambada_openai, test"),
    "piqa": Stock("piqa/piqa.yaml", ("goal", "sol1", "sol2", "label"), "baber/piqa, validation"),
    "hellaswag": Stock(
        "hellaswag/hellaswag.yaml",
        ("ctx_a", "ctx_b", "activity_label", "endings", "label"),
        "Rowan/hellaswag, validation",
        "acc_norm",
    ),
    "winogrande": Stock(
        "winogrande/default.yaml",
        ("sentence", "option1", "option2", "answer"),
        "allenai/winogrande winogrande_xl, validation",
    ),
    "arc_easy": Stock("arc/arc_easy.yaml", ("question", "choices", "answerKey"), "allenai/ai2_arc ARC-Easy, test"),
    "arc_challenge": Stock(
        "arc/arc_challenge.yaml",
        ("question", "choices", "answerKey"),
        "allenai/ai2_arc ARC-Challenge, test",
        "acc_norm",
    ),
    "commonsense_qa": Stock(
        "commonsense_qa/default.yaml", ("question", "choices", "answerKey"), "tau/commonsense_qa, validation"
    ),
    "boolq": Stock(
        "super_glue/boolq/default.yaml", ("passage", "question", "label"), "aps/super_glue boolq, validation"
    ),
}


def task(name: str, folder: Path) -> Any:
    """A task of lm-eval over the rows of FOLDER/NAME.jsonl. Raises `UserError` where they are not there."""
    stock, file = TASKS[name], folder / f"{name}.jsonl"
    if not file.is_file():
        raise UserError(
            f"commonsense: no {file}: put the rows of {stock.published} (on the hub) there as JSON lines with the "
            f"fields {', '.join(stock.fields)}"
        )
    library, datasets = need("lm_eval", "lm", "mixassay eval"), need("datasets", "lm", "mixassay eval")
    load_yaml = need("lm_eval.tasks._yaml_loader", "lm", "mixassay eval").load_yaml
    with quiet():
        rows = datasets.load_dataset("json", data_files={"test": str(file)}, split="test")
    missing = [field for field in stock.fields if field not in rows.column_names]
    if missing:
        raise UserError(f"{file}: no field {', '.join(missing)}; found {', '.join(rows.column_names)}")
    config = dict(load_yaml(Path(library.__file__).parent / "tasks" / stock.file, resolve_func=True))
    for key in (
        "include",
        "tag",
        "dataset_path",
        "dataset_name",
        "dataset_kwargs",
        "training_split",
        "validation_split",
    ):
        config.pop(key, None)
    config |= {"test_split": "test", "custom_dataset": lambda **_: {"test": rows}, "num_fewshot": 0}
    with quiet():
        return need("lm_eval.api.task", "lm", "mixassay eval").ConfigurableTask(config=config)


def ask(lm: Any, name: str, task: Any, n: int | None) -> tuple[Set, list[Answer], dict[str, float]]:
    """What was asked and answered, in the form of all other sets, and every metric that lm-eval reports."""
    samples, results = evaluated(lm, {name: task}, limit=n)
    metric = TASKS[name].metric
    logged = sorted(samples[name], key=lambda sample: sample["doc_id"])
    questions, answers = [], []
    for sample in logged:
        asked = [before + then for before, then in sample["arguments"]]
        likeliest = max(range(len(asked)), key=lambda i: sample["filtered_resps"][i][0])
        answers.append(Answer(sample["arguments"][likeliest][1], float(sample[metric])))
        questions.append(Question("\n\n".join(asked), (str(sample["target"]),), 0, 0, 0))
    found = {
        key.removesuffix(",none"): float(value)
        for key, value in results[name].items()
        if key.endswith(",none") and isinstance(value, (int, float))
    }
    version = f"lm-eval-{name}/{task.VERSION}"
    prompts = hashed(question.prompt for question in questions)[:16]
    recipe = {"generator": "lm-eval", "version": str(task.VERSION), "metric": metric, "prompts": prompts}
    return Set(name, tuple(questions), _unscored, version, recipe), answers, found


def _unscored(question: Question, text: str) -> float:
    raise NotImplementedError("lm-eval scores its own tasks")


def sing(name: str, task: Any, n: int | None) -> None:
    """The canaries of a task of likelihoods. Raises `Refused`."""
    for honest in (True, False):
        _, answers, _ = ask(judge({name: task}, honest=honest), name, task, n)
        for number, answer in enumerate(answers):
            if answer.score != honest:
                kind = "the right continuation" if honest else "every continuation but the right one"
                raise Refused(
                    f"canary: {name}, question {number}: a model that finds {kind} likeliest scores {answer.score:g}, "
                    f"not {honest:d}: the template or the score of this task is wrong"
                )
