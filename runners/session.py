"""One `mixassay run`, from the loaded sweep to the ended workers, and the table of what is stored."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from mixassay import plugins, texts
from mixassay.errors import UserError
from mixassay.record import RunRecord
from mixassay.runners import report
from mixassay.runners.any_code import AnyCode
from mixassay.runners.choices import Choices, chosen
from mixassay.runners.cost import Costs
from mixassay.runners.crew import Crew
from mixassay.runners.launch import Ending, Launcher, Settings
from mixassay.runners.machine import accelerator_possible, cores
from mixassay.runners.plan import Mode, Plan
from mixassay.runners.progress import Display, Event
from mixassay.runners.recorder import Recorder
from mixassay.runners.store import Store
from mixassay.settings import Run, Tracker
from mixassay.source import Problems
from mixassay.sweep import Sweep

CHOICES = "selected.yaml"

PIECES = 4
"""Jobs for each slot that a sweep is cut into on CPUs, where models gain nothing from a common stack, so that no slot
is left with the longest job at the end."""

LARGEST = 32
"""Models in one stack, unless the sweep says otherwise; a stack that does not fit is cut in two, as often as needed.
Nothing would be gained by measuring a better number (docs/log.md)."""

EXIT = {"refused": 2, "fail-fast": 3, "same error": 3, "terminated": 75, "max-time": 75, "interrupted": 130}


Engine = Literal["local", "ray"]


@dataclass(frozen=True)
class Options:
    """What the command line says beside the sweep: nothing here moves a number."""

    results: Path
    overrides: tuple[str, ...] = ()
    device: str | None = None
    mode: Mode = "cached"
    shard: tuple[int, int] = (1, 1)
    max_time: float | None = None
    fail_fast: bool = False
    as_json: bool = False
    engine: Engine = "local"


class Session:
    """Finds the machine, the records and what is to do. `run` then does it."""

    def __init__(self, sweep: Sweep, options: Options) -> None:
        self.sweep, self.options = sweep, options
        self.store = Store(options.results)
        check_ranks(sweep)
        check_texts(sweep)
        stored = self.store.read(sweep.name)
        self.warnings = stored.warnings
        self.crew, name, slots = crew_of(sweep.run, options)
        on_cpu, run = self.crew.on_cpu, sweep.run
        self.settings = Settings(
            slots, run.timeout, run.hang, run.retries, options.max_time, options.fail_fast, reusable=on_cpu
        )
        self.recorder = Recorder(name, threads=self.crew.threads, plugins=plugins.files(sweep.plugins))
        self.folder = options.results / sweep.name
        keys = AnyCode(self.recorder, stored.records, sweep.seeds) if options.mode == "any-code" else self.recorder
        self.plan = Plan(
            sweep,
            keys,
            stored.records,
            Choices(self.folder / CHOICES),
            mode=options.mode,
            pieces=PIECES * slots if on_cpu else slots,
            size=run.stack if isinstance(run.stack, int) else LARGEST,
            shard=options.shard,
        )
        self.costs = Costs(stored.records, str(self.recorder.env["class"]))

    def run(self, console: Console) -> Ending:
        """Train what is missing, telling `console` (and with `as_json` standard output) how it goes."""
        if not self.plan.queue:
            self.crew.close()
            return Ending()
        self.store.check_writable()
        checkpoints = self._checkpoints()
        prepare = {
            "results": str(self.store.root.absolute()),  # a mixer may change the folder
            "plugins": list(self.sweep.plugins),
            "files": [str(path) for path in self.recorder.plugins],
            "kinds": [[spec.config(), self.recorder.source(spec)] for spec in self.recorder.kinds.values()],
            "every": self.sweep.run.checkpoint_every,
            "keep_weights": self.sweep.run.keep_weights,
            "language": language(self.sweep.run),
        }
        tracebacks = self.options.fail_fast
        with Display(self.plan, self.costs, console, self.settings.slots, self.options.as_json, tracebacks) as display:
            tell = display if self.sweep.run.tracker is None else mirrored(display, self.sweep.run.tracker, self.folder)
            launcher = Launcher(
                self.plan,
                self.crew,
                self.settings,
                check={"path": str(self.sweep.path), "overrides": list(self.options.overrides)},
                sweep=prepare,
                folder=checkpoints.absolute(),
                store=self.store,
                recorder=self.recorder,
                tell=tell,
            )
            return launcher.run()

    def exit_code(self, ending: Ending) -> int:
        """0: all there and well. 3: something failed, diverged or is missing. The rest: why it stopped early."""
        return EXIT.get(ending.reason, 3 if self.plan.failures() or self.plan.missing() else 0)

    def _checkpoints(self) -> Path:
        """The folder for checkpoints, which git does not see."""
        folder = self.folder / ".checkpoints"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".gitignore").write_text("*\n")
        except OSError as problem:
            raise UserError(f"cannot write to {folder}: {problem.strerror}; choose another --results") from problem
        return folder


def mirrored(display: Display, tracker: Tracker, folder: Path) -> Callable[[Event], None]:
    """Tell the display, and the tracker of the runs that have ended."""
    from mixassay.runners.track import Mirror

    mirror = Mirror(tracker, folder / ".tensorboard", lambda text: display({"event": "note", "text": text}))

    def tell(event: Event) -> None:
        display(event)
        if event["event"] == "run":
            mirror(event["record"])

    return tell


def table(sweep: Sweep, records: Sequence[RunRecord], results: Path) -> report.Table:
    """The sweep's table from what is stored under `results`: with the settings that are chosen there, by the present
    code where that is complete."""
    recorder = Recorder("any", threads=1, plugins=plugins.files(sweep.plugins))
    sources = {cell.cell: recorder.source(cell.sections) for cell in sweep.cells()}
    return report.build(sweep, records, sources=sources, chosen=chosen(results / sweep.name / CHOICES))


def crew_of(run: Run, options: Options) -> tuple[Crew, str, int]:
    """Those who are to work, the name of their device, and how many there may be."""
    wanted, each = options.device or run.device, run.slots if isinstance(run.slots, int) else None
    if options.engine == "ray":
        from mixassay.runners.ray_crew import RayCrew

        remote = RayCrew(wanted, run.threads if isinstance(run.threads, int) else 1, each, options.results)
        return remote, "cpu" if remote.on_cpu else remote.ask_device(), remote.slots
    crew, name = find_device(wanted, run.threads)
    if not crew.on_cpu:  # a worker takes the devices from its own on
        groups = len(crew.devices) // run.ranks
        crew.devices = crew.devices[: groups * run.ranks : run.ranks]
        if not groups:
            crew.close()
            raise UserError(f"run.ranks={run.ranks} needs as many GPUs of one kind; run.ranks=1 trains on one")
    each = each or (max(1, cores() // (crew.threads * run.ranks)) if crew.on_cpu else 1)
    return crew, name, each * len(crew.devices)


def check_ranks(sweep: Sweep) -> None:
    """Raise `UserError` for runs that so many ranks cannot share."""
    ranks = sweep.run.ranks
    for train in (cell.sections.train for cell in sweep.cells() if ranks > 1):
        if train.loop != "lm":
            raise UserError(f"run.ranks={ranks} is for language models alone (train.loop: lm)")
        if train.batch_size % ranks:
            raise UserError(f"train.batch_size={train.batch_size} must be a multiple of run.ranks={ranks}")


def check_texts(sweep: Sweep) -> None:
    """Raise `UserError` with a line for each text or tokenizer that cannot be read."""
    problems = Problems()
    for at, message in texts.unreadable(sweep):
        problems.add(at, message)
    problems.raise_any()


def language(run: Run) -> dict[str, Any]:
    """How a worker trains language models: see `lm.train.How`."""
    micro_batch = None if run.micro_batch == "auto" else run.micro_batch
    return {"ranks": run.ranks, "micro_batch": micro_batch, "compiled": run.compile}


def find_device(wanted: str, threads: int | str) -> tuple[Crew, str]:
    """A crew for the device, and the device's name. Where torch must be asked, by a first worker that then stays."""
    if wanted != "cpu" and not accelerator_possible():
        if wanted != "auto":
            raise UserError(f"device {wanted} is asked for, but this machine has none; use --device cpu")
        wanted = "cpu"
    each = 1 if wanted == "cpu" else min(cores(), 8)  # models this small gain little from a second thread
    crew = Crew(wanted, threads if isinstance(threads, int) else each)
    return (crew, "cpu") if wanted == "cpu" else (crew, crew.ask_device())
