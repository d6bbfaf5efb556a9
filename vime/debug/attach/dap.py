"""A client of the Debug Adapter Protocol: what an editor says to debugpy.

Source: https://microsoft.github.io/debug-adapter-protocol/specification. debugpy answers ``attach`` only after
``configurationDone``; a stop that is there already arrives as an event after that.
"""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vime.errors import VimeError

ANSWER_SECONDS = 20.0


class DapError(VimeError):
    """The adapter refused a request, did not answer in time, or has gone."""


@dataclass(frozen=True)
class StackFrame:
    """One frame of a stopped thread, the innermost first. ``line`` counts from 1; ``file`` "" without a source."""

    id: int
    name: str
    file: str
    line: int


@dataclass(frozen=True)
class Variable:
    """``reference``: pass it to ``Dap.variables`` for what is inside; 0 where nothing is."""

    name: str
    value: str
    type: str
    reference: int


class Dap:
    """One connection to a debug adapter; a thread of its own reads what arrives. Every wait ends in bounded time."""

    def __init__(self, host: str, port: int, seconds: float = ANSWER_SECONDS) -> None:
        """DapError where nothing listens there."""
        self.seconds = seconds
        try:
            self._socket = socket.create_connection((host, port), timeout=seconds)
        except OSError as error:
            raise DapError(f"nothing listens at {host}:{port}: {error}", "vime debug-attach list") from error
        self._socket.settimeout(None)
        self._file = self._socket.makefile("rb")
        self._numbers = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._events: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self.is_closed = False
        threading.Thread(target=self._read, name="dap", daemon=True).start()

    def __enter__(self) -> Dap:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def attach(
        self,
        breakpoints: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
        exceptions: Sequence[str] = ("uncaught",),
        path_mappings: Sequence[Mapping[str, str]] = (),
        just_my_code: bool = False,
    ) -> None:
        """Shake hands. ``breakpoints``: by file, ``{"line": 3, "condition": "i > 2"}``; ``exceptions``: filters."""
        client = {"clientID": "vime", "adapterID": "debugpy", "pathFormat": "path"}
        self._greet(self.send("initialize", **client, linesStartAt1=True, columnsStartAt1=True))
        mine = {"justMyCode": just_my_code, "subProcess": False, "pathMappings": list(path_mappings)}
        attached = self.send("attach", name="vime", type="python", request="attach", **mine)
        self.event("initialized")
        for file, lines in (breakpoints or {}).items():
            self.ask("setBreakpoints", source={"path": file}, breakpoints=list(lines))
        self.ask("setExceptionBreakpoints", filters=list(exceptions))
        self.ask("configurationDone")
        self.answer(attached)

    def _greet(self, number: int) -> None:
        try:
            self.answer(number)
        except DapError as error:
            if self.is_closed:
                raise
            raise DapError(
                f"the debug adapter does not answer ({self.seconds:g} s): it has another client, or lost a connection "
                "before it had greeted it, as after a port scan; then it takes no other one any more (debugpy 1.8)",
                "vime debug-attach resume lets the process go on",
            ) from error

    def stopped(self, seconds: float | None = None) -> tuple[int, str]:
        """(thread id, reason) of the next stop."""
        body = self.event("stopped", seconds)["body"]
        return body["threadId"], body["reason"]

    def stack(self, thread: int, levels: int = 50) -> list[StackFrame]:
        """Frames of a stopped thread, the innermost first."""
        rows = self.ask("stackTrace", threadId=thread, startFrame=0, levels=levels)["stackFrames"]
        return [StackFrame(r["id"], r["name"], r.get("source", {}).get("path", ""), r["line"]) for r in rows]

    def locals(self, frame: StackFrame) -> list[Variable]:
        """Local names of a frame, as debugpy groups them."""
        scopes = self.ask("scopes", frameId=frame.id)["scopes"]
        return [v for s in scopes if s["name"] == "Locals" for v in self.variables(s["variablesReference"])]

    def variables(self, reference: int) -> list[Variable]:
        """What is inside a scope or a value."""
        rows = self.ask("variables", variablesReference=reference)["variables"]
        return [Variable(r["name"], r["value"], r.get("type", ""), r["variablesReference"]) for r in rows]

    def evaluate(self, expression: str, frame: StackFrame) -> str:
        """The value as text; a statement is run and gives "". DapError where it raises."""
        return str(self.ask("evaluate", expression=expression, frameId=frame.id, context="repl").get("result", ""))

    def go(self, command: str, thread: int) -> None:
        """``continue``, ``next``, ``stepIn``, ``stepOut``, or ``pause`` of a thread that runs."""
        self.ask(command, threadId=thread)

    def threads(self) -> list[tuple[int, str]]:
        """(id, name) of the threads of Python."""
        return [(row["id"], row["name"]) for row in self.ask("threads")["threads"]]

    def set_breakpoints(self, file: str, breakpoints: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """All those of a file anew. Answers in the same order: ``verified``, ``line`` where it was moved, ``message``.

        The conditions are Python; ``{"line": 3, "condition": "i > 2"}``.
        """
        return list(self.ask("setBreakpoints", source={"path": file}, breakpoints=list(breakpoints))["breakpoints"])

    def detach(self) -> None:
        """Let the process run on without a debugger."""
        self.ask("disconnect", terminateDebuggee=False)
        self.close()

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for its answer's body."""
        return self.answer(self.send(command, **arguments))

    def send(self, command: str, **arguments: Any) -> int:
        """Send a request; its number, for ``answer``."""
        number = next(self._numbers)
        message = {"seq": number, "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(message).encode()
        try:
            self._socket.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        except OSError as error:
            raise DapError(f"the process has gone: {command} could not be sent ({error})") from error
        return number

    def answer(self, number: int, seconds: float | None = None) -> dict[str, Any]:
        """The body of the answer to request ``number``."""
        found = self._wait(lambda: self._answers.pop(number, None), f"an answer to request {number}", seconds)
        if not found["success"]:
            raise DapError(f"{found['command']}: {found.get('message', 'refused')}")
        return found.get("body") or {}

    def event(self, name: str, seconds: float | None = None) -> dict[str, Any]:
        """The first event of this name that nobody has taken."""

        return self._wait(lambda: self._taken((name,)), f"event {name!r}", seconds)

    def first(self, names: Sequence[str], seconds: float) -> dict[str, Any] | None:
        """The first event of one of these names; None where none has come in time. DapError once it has hung up."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while (event := self._taken(names)) is None:
                left = deadline - time.monotonic()
                if self.is_closed:
                    raise DapError("the debug adapter has hung up")
                if left <= 0:
                    return None
                self._changed.wait(left)
            return event

    def close(self) -> None:
        """Hang up; a process that waits for us goes on."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            self.is_closed = True  # it has hung up first
        self._socket.close()

    def _taken(self, names: Sequence[str]) -> dict[str, Any] | None:
        for index, event in enumerate(self._events):
            if event["event"] in names:
                return self._events.pop(index)
        return None

    def _wait(self, found: Any, what: str, seconds: float | None) -> dict[str, Any]:
        limit = self.seconds if seconds is None else seconds
        deadline = time.monotonic() + limit
        with self._changed:
            while (taken := found()) is None:
                left = deadline - time.monotonic()
                if self.is_closed:
                    raise DapError(f"the debug adapter has hung up; {what} did not come")
                if left <= 0:
                    raise DapError(f"the debug adapter was waited for {limit:g} s: {what} did not come")
                self._changed.wait(left)
            return taken

    def _read(self) -> None:
        try:
            while (message := self._message()) is not None:
                with self._changed:
                    if message["type"] == "response":
                        self._answers[message["request_seq"]] = message
                    elif message["type"] == "event":
                        self._events.append(message)
                    self._changed.notify_all()
        except (OSError, ValueError):
            self.is_closed = True  # whoever waits says so
        finally:
            with self._changed:
                self.is_closed = True
                self._changed.notify_all()

    def _message(self) -> dict[str, Any] | None:
        """None at the end of the connection."""
        length = 0
        while line := self._file.readline():
            if not line.strip():
                return json.loads(self._file.read(length))
            name, _, value = line.partition(b":")
            if name.strip().lower() == b"content-length":
                length = int(value)
        return None
