"""Files that are seen whole or not at all: temporary name, flush, sync, rename."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from vime.errors import UsageError, VimeError


def check_new(path: Path, option: str) -> None:
    """UsageError if ``path`` cannot be made: it exists, or its folder does not."""
    if path.exists():
        raise UsageError(f"{option} {path} exists already", "choose another name with --out, or remove it")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}", "make the folder first")


def check_target(path: Path, option: str) -> None:
    """UsageError where no file can be written under ``path``: asked before the work whose result it is to hold."""
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}", "make the folder first")
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder", "name a file in it")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {path}: {path.parent} cannot be written to", "choose another folder")


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A binary file to write to, under a temporary name; flushed, synced and renamed at the end, whole or not at all.

    After a crash at any moment ``path`` is the old file, the new file, or absent. On an error nothing is left behind.
    VimeError if the system refuses to write.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # where nothing can be written, nothing can be removed
            temporary.unlink(missing_ok=True)
        raise VimeError(f"{path} cannot be written: {error.strerror or error}", "check the disk") from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """What was renamed in ``folder`` stays renamed after a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
