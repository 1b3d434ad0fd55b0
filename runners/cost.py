"""What runs cost, from what runs did cost: milliseconds for one step of one model, by shape."""

import statistics
from collections.abc import Iterable

from mixassay.record import RunRecord
from mixassay.runners.plan import steps_of
from mixassay.spec import Args, RunSpec, digest


class Costs:
    """Step times on one kind of machine (`env_class`), of stored records and of what is running now."""

    def __init__(self, records: Iterable[RunRecord], env_class: str) -> None:
        self._measured: dict[str, float] = {}
        self._shapes: dict[str, str] = {}  # by cell
        self._asked: dict[int, tuple[RunSpec, str]] = {}  # by identity: a display asks for the same few all the time
        for record in records:
            if (
                record.env.get("class") == env_class
                and record.status == "ok"
                and record.stopped
                and record.stopped.step
            ):
                if record.cell not in self._shapes:
                    self._shapes[record.cell] = shape(record.config)
                self._measured[self._shapes[record.cell]] = 1000 * record.time.seconds / record.stopped.step

    def learn(self, spec: RunSpec, ms: float) -> None:
        self._measured[self._shape(spec)] = ms

    def known(self, spec: RunSpec) -> float | None:
        """Milliseconds of a step of this shape, if one was ever measured; evaluation is in it."""
        return self._measured.get(self._shape(spec))

    def seconds(self, spec: RunSpec, steps: int | None = None) -> float | None:
        """Of a whole run, or of so many steps. For a shape never seen, as if it were like the middle of the others."""
        ms = self.known(spec)
        if ms is None and self._measured:
            ms = statistics.median(self._measured.values())
        return None if ms is None else ms / 1000 * (steps_of(spec) if steps is None else steps)

    def _shape(self, spec: RunSpec) -> str:
        if id(spec) not in self._asked:
            self._asked[id(spec)] = spec, shape(spec.config())
        return self._asked[id(spec)][1]


def shape(config: Args) -> str:
    """Hash of what the time of a step depends on: all but learning rate, decay, and how long it goes on."""
    train = {key: config["train"][key] for key in ("batch_size", "precision", "clip")}
    return digest([config["task"], config["mixer"], config["model"], train])
