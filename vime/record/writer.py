"""Write one rollout to one file: temporary name, flush, fsync, rename. Nobody ever sees half a file."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from vime.errors import UsageError, VimeError
from vime.record.archive import put_file
from vime.record.layout import FORMAT, SCHEMA_VERSION, checksum, plain_copy
from vime.record.packing import pack
from vime.record.template import template_path
from vime.types import RolloutBatch

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_SECONDS = 120.0


def write(path: str | os.PathLike[str], batch: RolloutBatch, *, overwrite: bool = False) -> None:
    """Write ``batch`` to ``path`` so that ``torch.load(path, weights_only=True)`` alone can open it.

    After a crash at any moment ``path`` is the old file, the new file, or absent; never a part of one. UsageError if
    the file exists and ``overwrite`` is False; VimeError naming the sample and key path if metadata is not plain data.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists already", "choose another name, or allow overwriting with run.overwrite=true")
    put_file(path, _content(batch))


def _content(batch: RolloutBatch) -> dict[str, Any]:
    try:
        plain = {
            "format": FORMAT,
            "schema_version": SCHEMA_VERSION,
            "rollout_id": int(batch.rollout_id),
            "header": plain_copy({**asdict(batch.header), "schema_version": SCHEMA_VERSION}, "header"),
        }
        arrays = pack(batch)
    except TypeError as error:
        raise VimeError(
            f"rollout {batch.rollout_id} cannot be recorded: {error}", "keep only plain data in metadata"
        ) from error
    return {**plain, "arrays": arrays, "checksum": checksum(plain, arrays)}


class Recorded(Protocol):
    """What is written to one file per rollout."""

    @property
    def rollout_id(self) -> int: ...


class RecordWriter:
    """Writes rollouts beside the run in one thread; an error surfaces at the next ``save`` or at ``close``.

    At most ``max_pending`` rollouts wait in memory; ``save`` blocks while there are more. ``write`` puts one into a
    file, as ``vime.record.write`` does.
    """

    def __init__(
        self, template: str, *, overwrite: bool = False, max_pending: int = 2, write: Callable[..., None] = write
    ) -> None:
        self._template = template
        self._overwrite = overwrite
        self._write = write
        self._queue: queue.Queue[Recorded | None] = queue.Queue(max_pending)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="vime-record-writer", daemon=True)
        self._thread.start()

    def save(self, batch: Recorded) -> None:
        """Queue ``batch`` for ``template.format(rollout_id=batch.rollout_id)``. Raises what an earlier write raised."""
        self._raise_error()
        try:
            self._queue.put(batch, timeout=CLOSE_TIMEOUT_SECONDS)
        except queue.Full:
            raise VimeError(f"writing rollout records to {self._template} is stuck", "check the disk") from None

    def close(self) -> None:
        """Wait until everything is on disk; raises the first error of any write."""
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=CLOSE_TIMEOUT_SECONDS)
            except queue.Full:
                raise VimeError(f"writing rollout records to {self._template} is stuck", "check the disk") from None
            self._thread.join(CLOSE_TIMEOUT_SECONDS)
            if self._thread.is_alive():
                raise VimeError(
                    f"rollout records for {self._template} not written within {CLOSE_TIMEOUT_SECONDS:.0f} s",
                    "check the disk",
                )
        self._raise_error()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except Exception as later:
            if error is None:
                raise
            logger.warning("after the failure: %s", later)  # it must not hide the first cause

    def _work(self) -> None:
        while (batch := self._queue.get()) is not None:
            if self._error is None:
                try:
                    self._write(template_path(self._template, batch.rollout_id), batch, overwrite=self._overwrite)
                except Exception as error:  # noqa: BLE001 - raised again in the caller's thread
                    self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
