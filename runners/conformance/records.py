"""Results as records, one JSON object a check, and as the table of checks by mixers.

`python -P -m mixassay.runners.conformance.records FILE.jsonl ...` prints the table of records.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mixassay import provenance

Record = dict[str, Any]

MARKS = {"pass": "✓", "fail": "**✗**", "not offered": "–", "not judged": "?"}
MEASURED = {
    "parameters": "parameters, and the width",
    "state_size": "how the state grows with T, and its bytes for one sequence",
    "time_law": "exponent of the time of one forward in T, and the longest T tried",
    "growth": "exponent of the size of outputs in t",
    "dtypes": "relative error of y against float64",
    "recall": "accuracy on a small recall task after a short training, and chance",
}
"""Checks whose numbers are worth a table of their own."""


def record(subject: Mapping[str, Any], result: Any) -> Record:
    """One line: the subject's fields, then the result."""
    found: Record = {**subject, "check": result.check.name, "status": result.status}
    if result.measured:
        found["measured"] = {name: rounded(value) for name, value in result.measured.items()}
    if result.message:
        found["message"] = result.message
    if result.smallest:
        found["smallest"] = result.smallest
    return found


def rounded(value: float | int | str) -> float | int | str:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def described(name: str, args: Mapping[str, Any], d_model: int, device: str, full: bool) -> Record:
    """What all records of one mixer share."""
    code = provenance.code("")
    where = {"commit": code.commit, "dirty": code.dirty, "version": code.version, "env": provenance.env_class(device)}
    return {"conformance": 1, "mixer": name, "args": dict(args), "d_model": d_model, "full": full, **where}


def shown(measured: Mapping[str, float | int | str]) -> str:
    """`law constant, bytes at T=128 1,088`"""
    return ", ".join(f"{name} {number(value)}" for name, value in measured.items())


def number(value: float | int | str) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}" if isinstance(value, float) else value


def write(folder: Path, records: Sequence[Record]) -> None:
    """`records.jsonl` and `TABLE.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "records.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
    (folder / "TABLE.md").write_text(table(records))


def table(records: Iterable[Record]) -> str:
    """Markdown: checks by mixers, the claims in words, what was measured, and what failed."""
    from mixassay.runners.conformance.table import CHECKS  # imports torch

    rows: dict[str, dict[str, Record]] = {}
    for found in records:
        rows.setdefault(found["mixer"], {})[found["check"]] = found
    lines = ["# Conformance", "", heading([found for row in rows.values() for found in row.values()]), ""]
    lines += grid("check", rows)
    for check in CHECKS:
        lines.append(
            line(check.name, *(MARKS[row[check.name]["status"]] if check.name in row else "" for row in rows.values()))
        )
    lines += ["", "## Claims", "", *(f"- **{check.name}**: {check.claim}" for check in CHECKS)]
    lines += ["", "## Measured", "", *(f"- **{name}**: {about}" for name, about in MEASURED.items()), ""]
    lines += grid("mixer", MEASURED)
    for mixer, row in rows.items():
        lines.append(line(mixer, *(shown(row[name].get("measured", {})) if name in row else "" for name in MEASURED)))
    failed = [found for row in rows.values() for found in row.values() if found["status"] == "fail"]
    lines += ["", "## Failures", ""] if failed else []
    lines += [f"- {r['mixer']}, {r['check']}: {r['message']} {r.get('smallest', '')}".rstrip() for r in failed]
    return "\n".join(lines) + "\n"


def heading(records: Sequence[Record]) -> str:
    """Where, by which code and how thoroughly."""
    where = sorted({r["env"] for r in records})
    commits = sorted({r["commit"][:12] + (" and changes" if r["dirty"] else "") for r in records})
    settings = sorted({"full" if r["full"] else "quick" for r in records})
    said = f"`mixassay check` on {'; '.join(where)}; commit {', '.join(commits)}; {' and '.join(settings)} settings."
    return f"{said} ✓ holds, ✗ does not, – not offered, ? not judged: needs another that failed."


def grid(first: str, columns: Iterable[str]) -> list[str]:
    """The head of a table."""
    names = [first, *columns]
    return [line(*names), line(*["---"] * len(names))]


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    texts = [text for file in sys.argv[1:] for text in Path(file).read_text().splitlines()]
    print(table(json.loads(text) for text in texts), end="")
