"""Our models inside lm-eval: its registry, its requests, its evaluator."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mixassay.runners.eval.language import Language
from mixassay.tokens import Bytes

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from mixassay.runners.eval import adapter, engine, ruler
from mixassay.runners.eval.question import Question, Set
from mixassay.tasks.ruler.sources import SHIPPED
from mixassay.tasks.ruler.table import TASKS


def requests(kind: Any, *arguments: Any) -> list[Instance]:
    return [Instance(kind, {}, arg, 0, metadata=("t", n, 1)) for n, arg in enumerate(arguments)]


@pytest.fixture
def lm(tiny: Any) -> Any:
    return adapter.Adapter(Language(tiny("mamba2"), Bytes(), 4, "fp64"))


def loglikelihood(lm: Any, before: bytes, then: bytes) -> float:
    ids = torch.tensor([[256, *before, *then]] if not before else [[*before, *then]])
    with torch.no_grad():
        logits = lm.language.model(ids[:, :-1])[0, -len(then) :]
    return float(logits.log_softmax(-1).gather(1, ids[0, -len(then) :, None]).sum())


def test_loglikelihoods(lm: Any) -> None:
    """A text without context follows the end of a text; white space at the end of a context belongs to what follows."""
    found = lm.loglikelihood(requests("loglikelihood", ("a b", " c"), ("", "abc"), ("a b ", "c")), disable_tqdm=True)
    expected = [loglikelihood(lm, b"a b", b" c"), loglikelihood(lm, b"", b"abc"), loglikelihood(lm, b"a b", b" c")]
    assert [total for total, _ in found] == pytest.approx(expected, rel=1e-9)


def test_rolling_loglikelihood_is_of_the_whole_text(lm: Any) -> None:
    texts = ["some text", "a", "another one, longer than those"]
    found = lm.loglikelihood_rolling(requests("loglikelihood_rolling", *[(text,) for text in texts]))
    assert found == pytest.approx([loglikelihood(lm, b"", text.encode()) for text in texts], rel=1e-9)


def test_rolling_windows_of_a_model_with_learned_positions(tiny: Any) -> None:
    lm = adapter.Adapter(Language(tiny("attention", positions=8), Bytes(), 4, "fp64"))
    (found,) = lm.loglikelihood_rolling(requests("loglikelihood_rolling", ("0123456789abc",)))
    model = lm.language.model
    with torch.no_grad():
        first = model(torch.tensor([[256, *b"0123456"]]))[0].log_softmax(-1)
        second = model(torch.tensor([list(b"456789ab")]))[0].log_softmax(-1)
    expected = sum(float(first[i, id]) for i, id in enumerate(b"01234567"))
    expected += sum(float(second[i, id]) for i, id in enumerate(b"56789abc") if i >= 3)
    assert math.isfinite(found)
    assert found == pytest.approx(expected, rel=1e-9)


def test_generation_knows_the_names_that_tasks_use(lm: Any) -> None:
    asked = requests(
        "generate_until",
        ("needle", {"until": ["\n"], "max_gen_toks": 4}),
        ("needle", {"until": "\n", "max_new_tokens": 4, "do_sample": False, "temperature": 0.0}),
    )
    first, second = lm.generate_until(asked)
    assert first == second
    assert 0 < len(first) <= 4
    with pytest.raises(Exception, match="greedy, but a task asks for sampling"):
        lm.generate_until(requests("generate_until", ("n", {"until": [], "do_sample": True, "temperature": 0.7})))


def test_the_registered_model_opens_a_kept_run(kept: Any, tmp_path: Path) -> None:
    lm: Any = get_model("mixassay").create_from_arg_string(
        f"run={kept('gated_deltanet')},results={tmp_path / 'results'}", {"batch_size": 2, "device": "cpu"}
    )
    assert (lm.batch_size, lm.tokenizer_name, lm.eot_token_id) == (2, "bytes", 256)
    assert len(lm.generate_until(requests("generate_until", ("abc", {"until": [], "max_gen_toks": 3})))[0]) > 0


def test_the_engine_and_the_loop_without_it_give_the_same_answers(tiny: Any) -> None:
    prompts = ["one", "two ", "three\n", "{{four}}", "fünf"]
    asked = Set(
        "echo",
        tuple(Question(prompt, ("e",), 5, len(prompt.encode()), len(prompt.encode())) for prompt in prompts),
        lambda question, text: float(len(text) % 2),
        "echo/1",
        {},
    )
    language = Language(tiny("log_linear_mamba2"), Bytes(), 2, "fp64")
    assert engine.ask(adapter.Adapter(language), asked) == engine.ask_directly(language, asked)


HARNESS = Path(adapter.__file__).parent / "harness"


@pytest.mark.parametrize("name", TASKS)
def test_the_task_files_for_lm_eval_agree_with_the_table(name: str) -> None:
    config = load_yaml(HARNESS / f"{name}.yaml", resolve_func=False)
    assert config["task"] == f"mixassay_{name}"
    assert config["metadata"]["ruler_task"] == name
    assert config["generation_kwargs"] == {"until": [], "max_gen_toks": TASKS[name].new_tokens, "do_sample": False}


def test_a_task_file_asks_our_samples(kept: Any, tmp_path: Path) -> None:
    """By its path, as `lm_eval --tasks PATH` reads it, with the tokenizer of the run in --model_args."""
    told = {"run": kept("mamba2"), "results": str(tmp_path / "results"), "length": 768, "samples": 2, "cache": tmp_path}
    manager = TaskManager(include_defaults=False, metadata=told)
    with engine.quiet():
        tasks = manager.load([str(HARNESS / "niah_single_1.yaml")])["tasks"]
    lm: Any = get_model("mixassay").create_from_arg_string(
        f"run={told['run']},results={told['results']}", {"device": "cpu"}
    )
    samples, results = engine.evaluated(lm, tasks)
    asked = ruler.make("niah_single_1", 768, 42, 2, Bytes(), SHIPPED, tmp_path)
    assert [s["arguments"][0][0] for s in samples["mixassay_niah_single_1"]] == [q.prompt for q in asked.questions]
    assert results["mixassay_niah_single_1"]["score,none"] == 0.0
