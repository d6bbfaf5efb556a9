"""What a killed run leaves on this machine, found by a lock that ends with its process, and removed by the next run."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vime.weights.shm import SHARED_MEMORY, lock

RUN_PREFIX = "vime-run-"
MIN_AGE_SECONDS = 60.0  # between its creation and its lock a folder of a run that starts now must not be taken


def make_temp_dir() -> tuple[Path, int]:
    """A folder for one run, and the descriptor of the lock that says that the run lives."""
    folder = Path(tempfile.mkdtemp(prefix=RUN_PREFIX))
    return folder, lock(folder)


@contextmanager
def temp_dir() -> Iterator[Path]:
    """A folder for one run, removed at its end; what killed runs left is removed first."""
    remove_leftovers()
    folder, descriptor = make_temp_dir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def remove_leftovers(folders: tuple[str, ...] | None = None) -> list[Path]:
    """Remove temp folders and shared weights of this user's runs whose process is gone; returns what was removed."""
    removed = []
    for folder in folders or (tempfile.gettempdir(), SHARED_MEMORY):
        for path in Path(folder).glob(f"{RUN_PREFIX}*"):
            if _is_left_over(path):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
                removed.append(path)
    return removed


def _is_left_over(path: Path) -> bool:
    try:
        about = path.lstat()
        if about.st_uid != os.getuid() or time.time() - about.st_mtime < MIN_AGE_SECONDS or path.is_symlink():
            return False
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:  # another run removed it just now
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
