"""The check of a sweep that needs the code of its tasks and mixers: every cell, before anything trains.

Arguments are held against the signatures, tasks are really made, and mixers are built with the cell's width on the
meta device, where parameters take no memory. What they complain of is told at the place in the file that wrote it.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import nn

from mixassay import plugins
from mixassay.errors import UserError
from mixassay.fields import explained
from mixassay.mixers import mixer
from mixassay.plugins import told
from mixassay.registry import Registry, arguments, bind
from mixassay.source import Node, Place, Problems
from mixassay.spec import Args, MixerSpec, Named, Sections, TaskSpec, digest, task_cells
from mixassay.sweep import Cell, Sweep
from mixassay.tasks import Split, Task, task

GIVEN = ("d_model",)
"""Arguments of a mixer that the model supplies."""


def check(sweep: Sweep, *, ask: bool = True) -> None:
    """Raise `UserError` with a line for each fault that any cell has, and the first cell where a combination fails.

    ask: also make the last row of every split, lest a run find out behind its training that there are fewer.
    """
    load_plugins(sweep)
    checker = Checker(ask)
    for cell in sweep.cells():
        for sections, source in sweep.variants(cell):
            checker.check(replace(cell, sections=sections, source=source))
    if not checker.faults:
        checker.distinct(sweep)
    problems = Problems()
    for (at, message), failing in checker.faults.items():
        problems.add(at, f"{message} [cell {failing}]" if failing and failing.axes else message)
    problems.raise_any()


def load_plugins(sweep: Sweep) -> None:
    """Import the plug-ins of a sweep; what fails is told at the place that names them."""
    problems = Problems()
    for i, name in enumerate(sweep.plugins):
        try:
            plugins.load([name])
        except UserError as fault:
            problems.add(sweep.source.nearest(f"plugins.{i}").at, str(fault))
    problems.raise_any()


class Checker:
    """Faults found so far, and what was made without fault, to be made only once."""

    def __init__(self, ask: bool) -> None:
        self.ask = ask
        self.faults: dict[tuple[Place, str], Cell | None] = {}
        self.made: dict[str, int] = {}  # hash of what was made -> its vocabulary, for a task

    def check(self, cell: Cell) -> None:
        self.task(cell)
        self.mixer(cell, cell.sections.mixer, "mixer")
        if cell.sections.model.hybrid is not None:
            self.mixer(cell, cell.sections.model.hybrid, "model.hybrid")

    def task(self, cell: Cell) -> None:
        """The task in each of its train and eval cells. They share one model, and so one vocabulary."""
        spec = cell.sections.task
        vocabularies: dict[int, str] = {}
        kinds: tuple[Literal["train", "eval"], ...] = ("train", "eval")
        for kind in kinds:
            named = kind if kind == "eval" and spec.eval_cells else "train"
            for i, (args, _, _) in enumerate(task_cells(spec, kind)):
                path = f"task.{named}_cells.{i}"
                written = cell.source.find(path)
                node = cell.source.nearest("task")
                node = node.merge(written) if written else node
                make = functools.partial(asked, last_rows(spec, kind) if self.ask else {})
                key = digest(["task", spec.name, args, make.args])
                if key not in self.made:
                    found = self.build(cell, task, spec, args, node, "task", make)
                    if found is None:
                        continue
                    self.made[key] = found
                vocabularies.setdefault(self.made[key], path if written else "task")
        if len(vocabularies) > 1:
            sizes = " and ".join(f"{size} ({path})" for size, path in vocabularies.items())
            message = f"all cells of a task must share one vocabulary, found {sizes}"
            self.add(cell.source.nearest("task").at, message, cell)

    def mixer(self, cell: Cell, spec: MixerSpec, path: str) -> None:
        d_model = cell.sections.model.d_model
        key = digest(["mixer", spec.name, spec.args, d_model])
        if key not in self.made:
            node = cell.source.nearest(path)
            found = self.build(cell, mixer, spec, spec.args, node, path, lambda cls, kw: tried(cls, d_model, kw))
            if found is not None:
                self.made[key] = found

    def build(
        self,
        cell: Cell,
        registry: Registry[Any],
        spec: Named,
        args: Args,
        node: Node,
        path: str,
        make: Callable[[type, Args], int],
    ) -> int | None:
        """What `make` makes of the named class and its arguments, or None, with the faults noted."""
        given = GIVEN if registry is mixer else ()
        try:
            cls = registry[spec.name]
        except (UserError, ImportError) as fault:
            message = str(fault) if isinstance(fault, UserError) else f"{registry.kind} {spec.name}: {told(fault)}"
            self.add(node.nearest("name").at, message)
            return None
        try:
            return make(cls, bind(cls, args, given))
        except ValidationError as fault:
            for at, message in explained(fault, arguments(cls, given), node, path):
                self.add(at, f"{spec.name}: {message}")
        except UserError as fault:
            message = str(fault) if str(fault).startswith(f"{spec.name}:") else f"{spec.name}: {fault}"
            self.add(blamed(message, node, cell.source), message, cell)
        except Exception as fault:
            message = f"{registry.kind} {spec.name} cannot be made: {told(fault)}"
            self.add(node.nearest("name").at, message, cell)
        return None

    def add(self, at: Place, message: str, cell: Cell | None = None) -> None:
        self.faults.setdefault((at, message), cell)

    def distinct(self, sweep: Sweep) -> None:
        """Two cells that are one and the same once all defaults are filled in would be one run counted as two."""
        seen: dict[str, Cell] = {}
        for cell in sweep.cells():
            twin = seen.setdefault(resolved(cell.sections).fingerprint(without=sweep.tuned), cell)
            if twin is not cell:
                at = next((n.at for p, n in cell.source.leaves() if twin.source.find(p) != n), cell.source.at)
                self.add(at, f"with defaults filled in, ({twin}) and ({cell}) are the same configuration")


def resolved(sections: Sections) -> Sections:
    """The sections with the defaults of their task's and mixer's own arguments filled in."""
    filled = {f"mixer.{k}": v for k, v in defaults(mixer[sections.mixer.name], GIVEN).items()}
    filled |= {f"task.{k}": v for k, v in defaults(task[sections.task.name]).items()}
    own = {f"mixer.{k}" for k in sections.mixer.args} | {f"task.{k}" for k in sections.task.args}
    return sections.having({path: value for path, value in filled.items() if path not in own})


def defaults(cls: type, given: Sequence[str] = ()) -> Args:
    """The default values of a class's arguments, as plain data."""
    model = arguments(cls, tuple(given))
    values = model.model_construct().model_dump(mode="json")
    return {name: value for name, value in values.items() if not model.model_fields[name].is_required()}


def tried(cls: type[nn.Module], d_model: int, args: Args) -> int:
    """Build a mixer for nothing but its complaints. Where the meta device is too little for it, on the CPU."""
    try:
        with torch.device("meta"):
            made = cls(d_model, **args)
    except UserError:
        raise
    except Exception:
        with torch.random.fork_rng(devices=[]):
            made = cls(d_model, **args)
    for name, p in made.named_parameters():
        if not p.requires_grad:  # stacked, it would be trained all the same
            raise UserError(f"parameter {name} takes no gradient; what is not trained is a buffer (register_buffer)")
    return d_model


def last_rows(spec: TaskSpec, kind: Literal["train", "eval"]) -> dict[Split, int]:
    """A row of each split, as far as a run will ask for it; of training text any row is as good as another."""
    if kind == "train":
        return {"train": 0}
    return {"valid": spec.valid_examples - 1, "test": spec.test_examples - 1}


def asked(rows: Mapping[Split, int], cls: type[Task], args: Args) -> int:
    """Make a task and these rows of it for nothing but their complaints; its vocabulary."""
    made = cls(**args)
    for split, index in rows.items():
        made.rows(torch.tensor([index]), seed=0, split=split)
    return made.vocab_size


def blamed(message: str, node: Node, source: Node) -> Place:
    """Where the first value was written that a complaint names; else where the task or mixer was named."""
    width = source.find("model.d_model")
    written = {"d_model": width} if width else {}
    written |= node.value if isinstance(node.value, dict) else {}
    for word in re.findall(r"\w+", message):
        if word in written and word != "name":
            return written[word].at
    return node.nearest("name").at
