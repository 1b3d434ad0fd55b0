"""One holder at a time, among processes; the system lets go when the holder dies, however it dies."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def hold(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Whether the lock is ours, for as long as the block runs; the block may delete the file and its folder.

    Raises `OSError` where the file cannot be made. On a file system without locks everyone gets it: work may then be
    done twice, which the store tolerates.
    """
    while True:
        fd = _open(path)
        try:
            if not _lock(fd, wait):
                yield False
                return
            if not _is(fd, path):  # its holder has deleted it while we were opening it
                continue
            yield True
            return
        finally:
            os.close(fd)


def _open(path: Path) -> int:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # the folder has gone again
            return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def _lock(fd: int, wait: bool) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as problem:
        if problem.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):
            raise
    return True


def _is(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
