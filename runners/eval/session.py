"""`mixassay eval`: a model, the sets of a suite, canaries first, a record for each task and length as soon as it is
there."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mixassay import provenance
from mixassay.errors import UserError
from mixassay.record import RunRecord
from mixassay.runners.eval import canary, engine, hub, kept, longbench, longbench_v2, retrieval, ruler, stock, suites
from mixassay.runners.eval.kept import Asked, Subject
from mixassay.runners.eval.language import Language, Precision
from mixassay.runners.eval.opened import device_of, opened
from mixassay.runners.eval.question import Answer, Set
from mixassay.runners.eval.script import told
from mixassay.runners.eval.suites import NO_DATA, Data, Suite
from mixassay.runners.extras import need
from mixassay.runners.longbench.metrics.code import EditDistance
from mixassay.runners.memory import out_of_memory
from mixassay.runners.store import Store
from mixassay.tasks.ruler.sources import TEXTS
from mixassay.tasks.ruler.table import Compat
from mixassay.tokens import Tokenizer

Engine = Literal["auto", "lm-eval", "direct"]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What the command line says. `model` is "run:KEY" or "hf:PATH"; `longest` None: what the model itself says."""

    model: str
    suite: Suite
    results: Path
    tasks: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    seeds: tuple[int, ...] = (42,)
    limit: int | None = None
    data: Data = NO_DATA
    essay: tuple[str, ...] = ()
    compat: Compat | None = None
    edit_distance: EditDistance = "difflib"
    tokenizer: str | None = None
    longest: int | None = None
    device: str = "auto"
    batch: int = 16
    precision: Precision = "fp32"
    engine: Engine = "auto"
    name: str | None = None  # of the records' suite
    plugins: tuple[str, ...] = ()


@dataclass
class Model:
    """A model of either kind. `lm` is lm-eval's, None without lm-eval; `language` is ours, None for others."""

    subject: Subject
    tokenizer: Tokenizer
    longest: int | None
    lm: Any | None
    language: Language | None = None
    batch: int = 16  # rows to begin with
    fitting: dict[int, int] = field(default_factory=dict)  # tokens of a set -> rows, where fewer had to do
    options: dict[str, Any] = field(default_factory=dict)

    def ask(self, asked: Set, tell: Tell) -> list[Answer]:
        if self.language is not None:
            self.language.state_bytes.clear()  # a record has those of its own set
        longest = max(question.tokens + question.new_tokens for question in asked.questions)
        with self.room(asked.name, asked.length or longest, tell):
            if self.lm is not None:
                return engine.ask(self.lm, asked)
            return engine.ask_directly(self.language, asked)

    @contextmanager
    def room(self, name: str, tokens: int, tell: Tell) -> Iterator[None]:
        """For a set of rows of so many tokens (0: unknown): no batch larger than what did for as many or fewer tokens
        before, and a line where it had to be halved. Raises `UserError` where memory does not do for it."""
        language = self.language
        before = min([self.batch, *(rows for length, rows in self.fitting.items() if length <= tokens)])
        if language is not None:
            language.batch = before
        try:
            yield
        except (RuntimeError, MemoryError) as problem:
            if not out_of_memory(problem):
                raise
            rows = "one row" if language is not None else f"{before} rows"
            size = f" of up to {tokens:,} tokens" if tokens else ""
            less = "" if language is not None else "a smaller --batch, "
            raise UserError(
                f"{name}: memory does not do for {rows}{size}. What would help: {less}shorter --lengths, --precision "
                "bf16, or a device with more memory or with no other process on it. All sets before are kept: the same "
                "command goes on behind them."
            ) from problem
        if language is not None and language.batch < before:
            self.fitting[tokens] = language.batch
            tell(f"{name}: out of memory at batch {before}; went on at batch {language.batch}")

    def canary(self, script: canary.Script, asked: Set) -> list[Answer]:
        if self.language is None:
            return engine.ask(canary.scripted(script, asked, self.tokenizer), asked)
        stand_in = told(self.language, {question.prompt: script(question) for question in asked.questions})
        if self.lm is not None:
            return engine.ask(type(self.lm)(stand_in), asked)
        return engine.ask_directly(stand_in, asked)


@dataclass(frozen=True)
class Job:
    """What one record is of, over which the canaries have sung."""

    sets: tuple[Set, ...]
    best: tuple[float, ...]

    @property
    def title(self) -> str:
        first, rest = self.sets[0].name, len(self.sets) - 1
        return first if not rest else f"{first} and {rest} more seed{'s' if rest > 1 else ''}"


def evaluate(options: Options, tell: Tell) -> list[RunRecord]:
    """Evaluate, and store. Returns the records of all that was asked, those that were stored before included.

    Raises `canary.Refused` before the model is asked anything, and `UserError` for what cannot be asked.
    """
    for text in options.essay:
        if text not in TEXTS and not Path(text).is_file():
            raise UserError(f"--essay {text}: there is no such file, and the shipped texts are {' and '.join(TEXTS)}")
    plan = suites.plan(options.suite, options.tasks, options.lengths, options.data)
    for why in plan.left_out.values():
        tell(f"left out: {why}")
    store, suite = Store(options.results), options.name or options.suite
    store.check_writable()
    stored = {record.key: record for record in store.read(suite).records}
    model = model_of(options)
    code = kept.code_of(model.subject)
    env = provenance.environment(device_name(model), threads=torch.get_num_threads())
    found = []

    def done(asked: Asked) -> None:
        label = kept.label(asked.sets, model.subject, model.options, code, env)
        record = kept.record(label, asked, model.subject, suite, code, env)
        kept.keep(record, asked, options.results)
        store.append([record])
        found.append(record)
        tell(f"{Job(asked.sets, ()).title}: {100 * (record.metrics['test/accuracy'] or 0):.1f}, n={len(asked.pairs)}")

    if options.suite == "commonsense":
        for asked in likelihoods(options, plan, model, tell):
            done(asked)
        return found
    for job in jobs(options, plan, model, tell):
        key = kept.label(job.sets, model.subject, model.options, code, env).key
        if key in stored:
            found.append(stored[key])
            tell(f"{job.title}: stored before")
            continue
        start = time.perf_counter()
        answers = tuple(tuple(model.ask(asked, tell)) for asked in job.sets)
        done(Asked(job.sets, answers, job.best, time.perf_counter() - start))
    return found


def jobs(options: Options, plan: suites.Plan, model: Model, tell: Tell) -> list[Job]:
    """All sets, made and sung over. Those of several data seeds are one job where the model has a seed of its own."""
    made = []
    for sets in asked_sets(options, plan, model, tell):
        sung = [canary.sing(asked, model.tokenizer, model.longest, model.canary) for asked in sets]
        for asked, one in zip(sets, sung, strict=True):
            if one.short:
                tell(
                    f"{asked.name}: {one.short} of {len(asked.questions)} right answers take more tokens than the task "
                    f"allows; no model can score above {100 * one.best:.1f}"
                )
        best = tuple(one.best for one in sung)
        if model.subject.seed is not None:
            made.append(Job(tuple(sets), best))
        else:
            made += [Job((asked,), (one,)) for asked, one in zip(sets, best, strict=True)]
    if not made:
        raise UserError("nothing is left to ask: give other lengths or tasks")
    tell(f"canaries: a copyist scored all that budgets allow, noise scored 0, in {len(made)} set(s) of {options.suite}")
    return made


def asked_sets(options: Options, plan: suites.Plan, model: Model, tell: Tell) -> Iterator[list[Set]]:
    """The sets of each task and length, one for each data seed where there are any. What fits no length is left out."""
    for task in plan.tasks:
        if options.suite in suites.HUBS:
            yield [longbench_set(task, options, model)]
        elif options.suite == "retrieval":
            rows = retrieval.load(task, suites.source_of("retrieval", options.data), options.limit)
            for length in plan.lengths or (None,):
                with left_out(tell):
                    yield [retrieval.make(task, rows, model.tokenizer, length)]
        else:
            for length in plan.lengths:
                with left_out(tell):
                    yield ruler_sets(task, length, options, model)


@contextmanager
def left_out(tell: Tell) -> Iterator[None]:
    """Tells why a set cannot be made, and goes on."""
    try:
        yield
    except UserError as problem:
        tell(f"left out: {problem}")


def longbench_set(task: str, options: Options, model: Model) -> Set:
    source = options.data.hub or suites.source_of(options.suite, options.data)
    if options.suite == "longbench-v2":
        return longbench_v2.make(source, options.limit, model.tokenizer, model.longest)
    return longbench.make(task, source, options.limit, model.tokenizer, model.longest, options.edit_distance)


def ruler_sets(task: str, length: int, options: Options, model: Model) -> list[Set]:
    sources = suites.sources(options.data.folder, options.essay)
    n, cache = options.limit or suites.SAMPLES, hidden(options.results / ".ruler")
    return [
        ruler.make(task, length, seed, n, model.tokenizer, sources, cache, options.compat) for seed in options.seeds
    ]


def likelihoods(options: Options, plan: suites.Plan, model: Model, tell: Tell) -> Iterator[Asked]:
    """lm-eval's own tasks; all canaries before the first of them."""
    if model.lm is None:
        raise UserError("the suite commonsense is lm-eval's: pip install 'mixassay[lm]'")
    place = suites.source_of("commonsense", options.data)
    tasks = {name: stock.task(name, place) for name in plan.tasks}
    for name, task in tasks.items():
        stock.sing(name, task, options.limit)
    for name, task in tasks.items():
        start = time.perf_counter()
        with model.room(name, 0, tell):
            asked, answers, more = stock.ask(model.lm, name, task, options.limit)
        yield Asked((asked,), (tuple(answers),), (1.0,), time.perf_counter() - start, more)


def hidden(folder: Path) -> Path:
    """A folder that git does not see."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    return folder


def model_of(options: Options) -> Model:
    kind, _, name = options.model.partition(":")
    if kind not in ("run", "hf") or not name:
        raise UserError(f"--model should be run:KEY, runs:FILE or hf:PATH, got {options.model}")
    return of_run(name, options) if kind == "run" else of_hub(name, options)


def of_run(name: str, options: Options) -> Model:
    found = opened(name, options.results, options.tokenizer, options.device, options.plugins)
    config, lm = found.about["config"], None
    language = Language(found.model, found.tokenizer, options.batch, options.precision)
    try_out(language, config["mixer"]["name"])
    if with_lm_eval(options.engine):
        need("lm_eval", "lm", "--engine lm-eval")
        from mixassay.runners.eval.adapter import Adapter

        lm = Adapter(language)
    names = [config["mixer"]["name"], *([config["model"]["hybrid"]["name"]] if config["model"]["hybrid"] else [])]
    mixers = tuple(f"mixassay.mixers.{one}" for one in names if (provenance.PACKAGE / f"mixers/{one}.py").is_file())
    subject = Subject(
        sections={
            "mixer": config["mixer"],
            "model": config["model"],
            "train": config["train"] | {"task": config["task"], "source": found.about["source"]},
        },
        seed=found.about["seed"],
        params=sum(p.numel() for p in found.model.parameters()),
        weights=found.sha256,
        source=mixers,
        state_bytes=language.state_bytes,
    )
    limit = min((x for x in (language.longest, options.longest) if x is not None), default=None)
    return Model(subject, found.tokenizer, limit, lm, language, options.batch, options=settings(options))


def try_out(language: Language, mixer: str) -> None:
    """Raise `UserError` for a model that cannot go on from a prompt token by token."""
    with torch.no_grad():
        try:
            _, state = language.model.prefill(torch.zeros(1, 1, dtype=torch.int64, device=language.device))
        except NotImplementedError:
            raise UserError(
                f"{mixer} has no recurrent form (init_state and step), without which no text can be written: "
                "docs/your-mixer.md"
            ) from None
    others = {type(leaf).__name__ for leaf in pytree.tree_leaves(state) if not isinstance(leaf, Tensor)}
    if others:
        raise UserError(
            f"the state of {mixer} holds {' and '.join(sorted(others))}: rows are evaluated together and end one by "
            "one, so every part of a state must be a tensor whose first dimension is the batch"
        )


def of_hub(path: str, options: Options) -> Model:
    device = device_of(options.device)
    dtype = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}[options.precision]
    lm, tokenizer = hub.opened(path, device, options.batch, dtype, options.longest)
    subject = Subject(
        sections={"mixer": {"name": f"hf:{Path(path).name}"}, "model": {"hf": Path(path).name}, "train": {}},
        seed=None,
        params=sum(p.numel() for p in lm.model.parameters()),
        weights=hub.weights(path),
        source=("mixassay.runners.eval.hub",),
    )
    return Model(subject, tokenizer, int(lm.max_length), lm, batch=options.batch, options=settings(options))


def settings(options: Options) -> dict[str, Any]:
    """What of the evaluation can move numbers, beside the sets."""
    return {"precision": options.precision}


def with_lm_eval(engine: Engine) -> bool:
    return find_spec("lm_eval") is not None if engine == "auto" else engine == "lm-eval"


def device_name(model: Model) -> str:
    device = model.language.device if model.language is not None else torch.device(model.lm.device)  # type: ignore[union-attr]
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
