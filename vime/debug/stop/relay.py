"""The cluster's registry for a process that was forked beside Ray, through a process of its own.

Ray's client waits for ever in such a child, for threads that a fork does not copy.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from typing import Any

from vime.debug.stop.registry import SECONDS, GcsRegistry
from vime.errors import VimeError
from vime.reward.breakpoints import DEBUG_SPEC, HOOK

START_SECONDS = 60.0
"""Longest wait for its first answer, beside that for the cluster's."""


class RelayedRegistry:
    """The key-value store of the cluster whose GCS listens at ``address``. Ends with this process."""

    def __init__(self, address: str) -> None:
        self.where = address
        self._lock = threading.Lock()
        self._buffer = b""
        code = f"import sys; sys.path[:] = {sys.path!r}; from vime.debug.stop.relay import main; main({address!r})"
        environment = {name: value for name, value in os.environ.items() if name not in (DEBUG_SPEC, HOOK)}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, start_new_session=True, **pipes
        )  # its standard input ends with this process

    def put(self, name: str, value: dict[str, Any]) -> None:
        self._ask("put", name, value)

    def claim(self, name: str, value: dict[str, Any]) -> bool:
        return bool(self._ask("claim", name, value))

    def get(self, name: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self._ask("get", name)
        return found

    def delete(self, name: str) -> None:
        self._ask("delete", name)

    def names(self, prefix: str = "") -> list[str]:
        return list(self._ask("names", prefix))

    def _ask(self, *words: Any) -> Any:
        with self._lock:
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps(words).encode() + b"\n")
                answer = json.loads(self._line())
            except (OSError, ValueError) as error:
                self._process.kill()
                why = f"the cluster at {self.where} does not answer a forked process: {error}"
                raise VimeError(why, "see what its own process says above") from error
        if "error" in answer:
            raise VimeError(answer["error"], answer["hint"])
        return answer["value"]

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            if not select.select([self._process.stdout], [], [], START_SECONDS + SECONDS)[0]:
                raise TimeoutError(f"nothing within {START_SECONDS + SECONDS:.0f} s")
            if not (read := os.read(self._process.stdout.fileno(), 65536)):
                raise EOFError("its own process has ended")
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def main(address: str) -> None:
    """Answer one line of JSON with another, until standard input ends."""
    registry: GcsRegistry | None = None
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        try:
            registry = registry or GcsRegistry(address)
            answer = {"value": getattr(registry, method)(*arguments)}
        except VimeError as error:
            answer = {"error": error.message, "hint": error.hint or ""}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
