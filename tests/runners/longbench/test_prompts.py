"""Prompts are the authors', whichever way lm-eval's templates stand."""

import json
from pathlib import Path

import pytest

from mixassay.errors import UserError
from mixassay.runners.longbench import prompts
from mixassay.runners.longbench.rows import Row
from mixassay.runners.longbench.sets import SETS


@pytest.fixture(autouse=True)
def fresh() -> None:
    pytest.importorskip("lm_eval")
    prompts.template.cache_clear()


def row(name: str) -> Row:
    return Row("", name, "QUESTION {{context}}", "CONTEXT {{question}}", ("a",), 1, "en", ())


def test_every_set_has_its_template_and_those_that_need_it_are_corrected() -> None:
    corrected = {name for name in SETS if prompts.template(name) != prompts.installed(f"longbench/{name}.yaml")}
    assert corrected == set(prompts.CORRECTIONS)
    for name, one in SETS.items():
        if one.by_length:
            plain, by_length = (prompts.installed(f"longbench/{form}.yaml") for form in (name, f"{name}_e"))
            assert plain == by_length


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("lcc", "CONTEXT {{question}}Next line of code:\n"),
        ("repobench-p", "CONTEXT {{question}}QUESTION {{context}}Next line of code:\n"),
        ("triviaqa", "CONTEXT {{question}}\n\nQUESTION {{context}}"),
        ("samsum", "CONTEXT {{question}}\n\nQUESTION {{context}}"),
        ("trec", "CONTEXT {{question}}\nQUESTION {{context}}"),
        ("passage_count", "The final answer is: "),
        ("passage_retrieval_en_e", "The answer is: "),
        ("hotpotqa", "\n\nQuestion: QUESTION {{context}}\nAnswer:"),
    ],
)
def test_a_prompt_ends_as_the_authors_does(name: str, end: str) -> None:
    """What is put in is not looked into, even where it looks like a place."""
    assert prompts.prompt(row(name)).endswith(end)


def test_another_template_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = prompts.installed("longbench/qasper.yaml")
    monkeypatch.setattr(prompts, "installed", lambda file: f"{before} ")
    with pytest.raises(UserError, match=r"qasper\.yaml of lm-eval .* is neither"):
        prompts.template("qasper")


def test_a_template_that_was_mended_needs_no_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    right = prompts.template("lcc")
    prompts.template.cache_clear()
    monkeypatch.setattr(prompts, "installed", lambda file: right)
    assert prompts.template("lcc") == right


def test_without_lm_eval_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"mixassay\[lm\]"):
        prompts.template("qasper")


def test_lengths_and_metrics_are_those_of_lm_eval() -> None:
    """An independent copy of the authors' configuration."""
    for name, one in SETS.items():
        task = prompts.task_file(f"longbench/{name}.yaml")
        assert task["generation_kwargs"]["max_gen_toks"] == one.max_new_tokens, name
        assert (task["generation_kwargs"]["until"] == ["\n"]) == one.first_line, name
        metric = task["process_results"].removeprefix("metrics.get_").removesuffix("_with_score")
        theirs = {"code_sim": "code", "retrieval_zh": "retrieval"}.get(metric, metric)
        assert theirs == one.metric, name


def test_the_sample_rows_fit_their_prompts(data: Path) -> None:
    raw = json.loads((data / "samples/qasper.jsonl").read_text().splitlines()[0])
    one = Row("", "qasper", raw["input"], raw["context"], tuple(raw["answers"]), raw["length"], "en", ())
    text = prompts.prompt(one)
    assert raw["context"] in text
    assert text.endswith(f"\n\nQuestion: {raw['input']}\n\nAnswer:")
