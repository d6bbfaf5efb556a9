"""One side of a comparison in a process of its own, called method by method."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from vime.errors import VimeError

CALL_SECONDS = 600.0
CLOSE_SECONDS = 20.0

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class Side:
    """``module:Class`` constructed with ``args`` in a new process, whose environment is ours and ``env``.

    Calls are answered one at a time. VimeError if the process ends, fails or does not answer in time.
    """

    def __init__(self, target: str, *args: Any, env: Mapping[str, str] | None = None) -> None:
        self.target = target
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, target, dict(env or {}), args))
        self._process.start()
        theirs.close()
        self._receive("starting")

    def call(self, method: str, *args: Any) -> Any:
        self._connection.send((method, args))
        return self._receive(method)

    def _receive(self, what: str) -> Any:
        if not self._connection.poll(CALL_SECONDS):
            self.close()
            raise VimeError(f"{self.target}: no answer to {what} within {CALL_SECONDS:g} s")
        try:
            value, problem = self._connection.recv()
        except EOFError as error:
            raise VimeError(f"{self.target}: its process ended during {what}") from error
        if problem is not None:
            raise VimeError(f"{self.target}: {what} failed:\n{problem}")
        return value

    def close(self) -> None:
        """End the process; killed if it does not end by itself."""
        self._connection.close()
        self._process.join(CLOSE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(CLOSE_SECONDS)

    def __enter__(self) -> Side:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _serve(connection: Connection, target: str, env: dict[str, str], args: tuple[Any, ...]) -> None:
    os.environ.update(env)
    os.dup2(2, 1)  # libraries print; stdout belongs to the table
    module, _, name = target.partition(":")
    made: list[Any] = []
    _answer(connection, lambda: made.append(getattr(importlib.import_module(module), name)(*args)))
    while made:
        try:
            method, given = connection.recv()
        except EOFError:
            break
        _answer(connection, lambda: getattr(made[0], method)(*given))  # noqa: B023 called before the next turn
    if made and hasattr(made[0], "close"):
        made[0].close()


def _answer(connection: Connection, call: Any) -> None:
    try:
        answer: tuple[Any, str | None] = (call(), None)
    except Exception:  # noqa: BLE001 carried to the caller, which raises
        answer = (None, traceback.format_exc())
    connection.send(answer)
