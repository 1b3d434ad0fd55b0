"""What an exception in a worker means: a full disk, or a fault in somebody's code."""

import errno
import inspect
import traceback
from pathlib import Path

from mixassay import provenance
from mixassay.errors import UserError
from mixassay.mixers import mixer
from mixassay.registry import Registry
from mixassay.spec import RunSpec
from mixassay.tasks import task

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


def disk(problem: BaseException) -> str | None:
    """The reason when a file could not be written, else None. safetensors hides the number in its text."""
    if isinstance(problem, OSError) and problem.errno in DISK:
        return problem.strerror
    if type(problem).__name__ == "SafetensorError" and "os error" in str(problem):
        return str(problem)
    return None


def told(problem: BaseException, spec: RunSpec) -> str:
    """The message in one line, and where in the user's code it came from: `shapes differ (gla.py:41)`."""
    text = " ".join(str(problem).split()) or "no message"
    return f"{text[:400]} ({origin(problem, spec)})"


def origin(problem: BaseException, spec: RunSpec) -> str:
    """`file:line` of the innermost frame in the file of the mixer or the task; else the innermost of this package."""
    frames = traceback.extract_tb(problem.__traceback__)
    named: list[tuple[Registry[type], str]] = [(mixer, spec.mixer.name), (task, spec.task.name)]
    if spec.model.hybrid is not None:
        named.insert(1, (mixer, spec.model.hybrid.name))
    files = [str(Path(file).resolve()) for kind, name in named if (file := _file_of(kind, name))]
    for file in [*files, None]:
        for frame in reversed(frames):
            path = Path(frame.filename).resolve()
            if str(path) == file or (file is None and _inside(path)):
                return f"{_shown(path)}:{frame.lineno}"
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"


def _file_of(kind: "Registry[type]", name: str) -> str | None:
    try:
        return inspect.getsourcefile(kind[name])
    except (UserError, ImportError, TypeError, OSError):
        return None


def _inside(path: Path) -> bool:
    return any(path.is_relative_to(part.resolve()) for part in provenance.PACKAGE.iterdir() if part.is_dir())


def _shown(path: Path) -> str:
    """Relative to the folder it belongs to, so that records name no machine's paths."""
    return f"{path.parent.name}/{path.name}" if _inside(path) else path.name
