"""Names runs and writes down what became of them, with the code and the machine that did it.

The main process names runs before any worker has started, and records those that a worker could not, so nothing here
imports torch. What ran must be what the name says: the source is hashed once, when the sweep starts, and a worker
that finds other files when it loads them refuses.
"""

import ast
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mixassay import corpus, provenance
from mixassay.errors import UserError
from mixassay.record import Curve, EvalCell, Failure, Language, RunRecord, Status, Stopped, Time, run_key
from mixassay.spec import RunSpec, Sections

if TYPE_CHECKING:
    from mixassay.runners.outcome import Outcome

Parts = tuple[str, str, str, str]


class Recorder:
    """Makes the keys and records of one sweep on one kind of machine. `device` is its name ("cpu", "NVIDIA H200")."""

    def __init__(self, device: str, *, threads: int, plugins: Iterable[Path] = ()) -> None:
        self.plugins = tuple(plugins)
        self.env = provenance.environment(device, threads=threads)
        self.kinds: dict[Parts, Sections] = {}  # one run of each kind that was asked about
        self._sources: dict[Parts, str] = {}
        self._data: dict[str, str] = {}

    def source(self, spec: Sections) -> str:
        """Hash of the code that the run depends on, as it was when first asked for."""
        kind = kind_of(spec)
        if kind not in self._sources:
            self.kinds[kind], self._sources[kind] = spec, provenance.source_of(spec, self.plugins)
        return self._sources[kind]

    def trust(self, spec: Sections, source: str) -> None:
        """Take the hash that the main process has found, after making sure that the files are still the same."""
        if provenance.source_of(spec, self.plugins) != source:
            raise UserError(
                f"the code of mixer {spec.mixer.name} or task {spec.task.name} changed while the sweep was running;"
                " start it again (finished runs of the old code are kept under the old code's name)"
            )
        self._sources[kind_of(spec)] = source

    def data(self, spec: RunSpec) -> str:
        """Name and version of the run's task, `mqar/1`, and the hashes of its text and tokenizer if it has them."""
        name = spec.task.name
        if name not in self._data:
            version = task_version(name, self.plugins)
            self._data[name] = f"{name}/{'?' if version is None else version}"
        return f"{self._data[name]} {corpus.described(spec.task)}".rstrip()

    def key(self, spec: RunSpec, source: str | None = None) -> str:
        """The run's key; with another `source`, the one that it has where the code is that."""
        code = self.source(spec) if source is None else source
        return run_key(spec, code, self.data(spec), str(self.env["class"]))

    def outcome(self, outcome: "Outcome", *, attempt: int = 1) -> RunRecord:
        """The record of a member that was trained to its end."""
        return self._record(
            outcome.spec,
            status=outcome.status,
            attempt=attempt,
            metrics=outcome.metrics,
            eval=tuple(EvalCell.model_validate(cell) for cell in outcome.eval),
            curve=Curve.model_validate(outcome.curve),
            stopped=Stopped.model_validate(outcome.stopped),
            state_bytes=outcome.state_bytes,
            live_state_bytes=outcome.live_state_bytes,
            params=outcome.params,
            weights=outcome.weights,
            time=Time(
                start=ago(outcome.seconds),
                seconds=outcome.seconds,
                ms_per_step=outcome.ms_per_step,
                stack=outcome.stack,
            ),
            error=Failure.model_validate(outcome.error) if outcome.error else None,
            language=Language.model_validate(outcome.language) if outcome.language else None,
        )

    def failure(
        self, spec: RunSpec, status: Status, kind: str, message: str, *, seconds: float = 0.0, attempt: int = 1
    ) -> RunRecord:
        """The record of a run that did not reach its end."""
        return self._record(
            spec,
            status=status,
            attempt=attempt,
            metrics={},
            time=Time(start=ago(seconds), seconds=seconds),
            error=Failure(type=kind, message=message),
        )

    def _record(self, spec: RunSpec, **found: Any) -> RunRecord:
        return RunRecord(
            key=self.key(spec),
            cell=spec.cell,
            suite=spec.suite,
            seed=spec.seed,
            role=spec.role,
            axes=spec.axes,
            tuned=spec.tuned,
            config=spec.config(),
            code=provenance.code(self.source(spec)),
            env=self.env,
            data=self.data(spec),
            **found,
        )


def kind_of(spec: Sections) -> Parts:
    """Runs of one kind depend on the same code."""
    hybrid = spec.model.hybrid.name if spec.model.hybrid else ""
    return spec.task.name, spec.mixer.name, hybrid, spec.train.loop


def ago(seconds: float) -> str:
    """The time that was `seconds` ago, UTC, ISO 8601."""
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


def task_version(name: str, plugins: Iterable[Path] = ()) -> int | None:
    """`version` of a task as its source text has it; None where it is computed there, or nobody registers the name."""
    built_in = provenance.PACKAGE / "tasks" / f"{name}.py"
    for path in [built_in] if built_in.is_file() else plugins:
        with provenance.parsing(path):
            classes = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.ClassDef)]
        for line in (line for node in classes if _registers(node, name) for line in node.body):
            value = line.value if isinstance(line, ast.AnnAssign) and ast.unparse(line.target) == "version" else None
            if isinstance(value, ast.Constant) and isinstance(value.value, int):
                return value.value
    return None


def _registers(node: ast.ClassDef, name: str) -> bool:
    """Whether a class is decorated with `@task("name")`."""
    return any(ast.unparse(decorator).endswith(f"task({name!r})") for decorator in node.decorator_list)
