"""A debugger in the terminal, over the Debug Adapter Protocol: what an editor would do, one line at a time.

It reads from a person or from a pipe. Whatever ends it lets the process run on, unless ``kill`` was asked for.
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vime.debug.attach.dap import Dap, DapError, StackFrame, Variable
from vime.debug.attach.screen import HELP, Screen
from vime.debug.attach.words import short_path

AROUND = 5
"""Lines shown before and after the one where it stands."""
POLL_SECONDS, FIRST_SECONDS = 0.2, 10.0
"""The second: for the stop that it has attached for; a slow machine is not taken for one that runs."""
SHORT = 200
_STEPS = {"s": "stepIn", "step": "stepIn", "n": "next", "next": "next", "r": "stepOut", "return": "stepOut"}
_GOES = _STEPS | {"c": "continue", "cont": "continue", "continue": "continue"}
_HUNG_UP = "the process has ended: it is not there any more"
_LEAVES = ("detach", "q", "quit", "exit")


@dataclass
class Terminal:
    """One session: attach, read commands, leave. ``own``: breakpoints set here, by file: line -> condition."""

    dap: Dap
    screen: Screen
    path_mappings: tuple[Mapping[str, str], ...] = ()
    thread: int = 0
    frames: list[StackFrame] = field(default_factory=list)
    at: int = 0
    is_over: bool = False
    own: dict[str, dict[int, str]] = field(default_factory=dict)

    def run(self) -> None:
        """Until somebody leaves, or the process ends. DapError where it cannot be attached to at all."""
        self.dap.attach(path_mappings=self.path_mappings)
        try:
            self._wait_for_stop(FIRST_SECONDS)
            while not self.is_over:
                line = self.screen.read("(vime) ")
                if line is None:
                    self._leave()
                elif line.strip():
                    self._interruptible(line.strip())
        finally:
            self.dap.close()

    def _interruptible(self, line: str) -> None:
        """Ctrl-C gives up a command; if the process runs by then, it is paused."""
        try:
            self._obey(line)
        except KeyboardInterrupt:
            if not self.frames and not self.is_over:
                self._pause()
                self._wait_for_stop()

    def _obey(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if line.startswith("!"):
            word, rest = "exec", line[1:]
        command = self._commands().get(word)
        if command is None:
            self.screen.say(f"no such command: {word} (help lists them)")
            return
        try:
            command(rest.strip())
        except DapError as error:
            if self._has_ended():
                self._end(_HUNG_UP)
            else:
                self.screen.say(f"error: {error.message}")

    def _has_ended(self) -> bool:
        try:
            return self.dap.first(("terminated", "exited"), POLL_SECONDS) is not None
        except DapError:
            return True

    def _commands(self) -> dict[str, Callable[[str], None]]:
        table: dict[str, Callable[[str], None]] = {word: self._go(word) for word in _GOES}
        table |= dict.fromkeys(("w", "where", "bt"), self._where) | dict.fromkeys(("l", "list"), self._list)
        table |= dict.fromkeys(("u", "up"), lambda _: self._move(1)) | dict.fromkeys(
            ("d", "down"), lambda _: self._move(-1)
        )
        table |= dict.fromkeys(("p", "print"), self._print) | {"exec": self._exec, "locals": self._locals}
        table |= {"threads": self._threads, "clear": self._clear} | dict.fromkeys(("b", "break"), self._break)
        table |= dict.fromkeys(("h", "help", "?"), lambda _: self.screen.say(HELP))
        return table | {"detach": lambda _: self._leave()} | dict.fromkeys(("q", "quit", "exit"), self._quit)

    @property
    def frame(self) -> StackFrame:
        self._stopped()
        return self.frames[self.at]

    def _stopped(self) -> None:
        """DapError where it is not."""
        if not self.frames:
            raise DapError("no thread of the process is stopped")

    def _go(self, word: str) -> Callable[[str], None]:
        def go(_rest: str) -> None:
            self._stopped()
            self.frames = []
            self.dap.go(_GOES[word], self.thread)
            if self.screen.is_interactive and _GOES[word] == "continue":
                self.screen.say("it runs on; Ctrl-C pauses it")
            self._wait_for_stop()

        return go

    def _wait_for_stop(self, seconds: float = POLL_SECONDS) -> None:
        """While it runs, Ctrl-C pauses it; from a pipe, its end detaches, and so do ``detach`` and ``quit``."""
        is_asked = False
        while not self.is_over:
            try:
                event = self.dap.first(("stopped", "terminated", "exited"), seconds)
                seconds = POLL_SECONDS
                if event is None:
                    self._while_running()
            except KeyboardInterrupt:
                if is_asked:
                    self._leave()
                    return
                is_asked = True
                self._pause()
                continue
            except DapError:
                self._end(_HUNG_UP)
                return
            if event is not None and event["event"] == "stopped":
                self._show_stop(event["body"])
                return
            if event is not None:
                self._end("the process has ended")

    def _pause(self) -> None:
        threads = self.dap.threads()
        known = [number for number, _ in threads if number == self.thread] or [number for number, _ in threads]
        self.dap.go("pause", known[0])
        self.screen.say("pausing; inside a C call it stops when that returns (Ctrl-C again: detach)")

    def _while_running(self) -> None:
        if not self.screen.ready():
            return
        line = self.screen.read("(runs) ")
        word = "detach" if line is None else line.strip()
        if word in _LEAVES:
            self._leave()
        elif word == "pause":
            self._pause()
        elif word:
            self.screen.say(f"the process runs: {word} waits for nothing; pause, detach or quit")

    def _show_stop(self, body: Mapping[str, Any]) -> None:
        self.thread, self.at = body["threadId"], 0
        self.frames = self.dap.stack(self.thread)
        text = f": {body['text']}" if body.get("text") else ""
        self.screen.say(f"stopped ({body['reason']}{text}) {_place(self.frame)}")
        self._list("")

    def _where(self, _rest: str) -> None:
        self._stopped()
        for number, frame in enumerate(self.frames):
            self.screen.say(f"{'>' if number == self.at else ' '} {number}  {_place(frame)}")

    def _list(self, rest: str) -> None:
        frame = self.frame
        around = int(rest) if rest.isdigit() else AROUND
        found = linecache.getlines(frame.file) if os.path.isfile(frame.file) else []
        if not found:
            self.screen.say(f"no source here: {frame.file or 'unknown file'}, line {frame.line}")
            return
        first = max(1, frame.line - around)
        lines = dict(enumerate((line.rstrip("\n") for line in found[first - 1 : frame.line + around]), first))
        self.screen.source(lines, frame.line)

    def _move(self, by: int) -> None:
        self._stopped()
        if not 0 <= self.at + by < len(self.frames):
            raise DapError("there is no frame further up" if by > 0 else "this is the innermost frame")
        self.at += by
        self.screen.say(_place(self.frame))
        self._list("")

    def _print(self, rest: str) -> None:
        if not rest:
            raise DapError("print what? print EXPR")
        self.screen.say(self._evaluated(rest))

    def _exec(self, rest: str) -> None:
        if value := self._evaluated(rest):
            self.screen.say(value)

    def _evaluated(self, text: str) -> str:
        try:
            return self.dap.evaluate(text, self.frame)
        except DapError as error:
            if self.dap.is_closed:
                raise
            raise DapError(_last_line(error.message)) from error

    def _locals(self, _: str) -> None:
        found = [v for v in self.dap.locals(self.frame) if not _is_group(v)]
        for variable in found:
            self.screen.say(f"{variable.name} = {_in_short(variable.value)}")
        if not found:
            self.screen.say("no local names")

    def _threads(self, _: str) -> None:
        for number, name in self.dap.threads():
            self.screen.say(f"{'>' if number == self.thread else ' '} {number}  {name}")

    def _break(self, rest: str) -> None:
        if not rest:
            places = [
                f"{short_path(f)}:{n}{f' if {c}' if c else ''}" for f, ls in self.own.items() for n, c in ls.items()
            ]
            self.screen.say("\n".join(places) or "no breakpoints were set here")
            return
        place, _, condition = rest.partition(" if ")
        file, line = self._parsed(place.strip())
        self.own.setdefault(file, {})[line] = condition.strip()
        answer = self._send_breakpoints(file)[list(self.own[file]).index(line)]
        if not answer.get("verified"):
            del self.own[file][line]
            self._send_breakpoints(file)
            raise DapError(f"no breakpoint at {place.strip()}: {answer.get('message', 'refused')}")
        moved = answer.get("line", line)
        self.own[file][moved] = self.own[file].pop(line)
        self.screen.say(f"breakpoint at {short_path(file)}:{moved}")

    def _clear(self, rest: str) -> None:
        gone = [self._parsed(rest)] if rest else [(f, n) for f, lines in self.own.items() for n in lines]
        for file, line in gone:
            if line not in self.own.get(file, {}):
                raise DapError(f"no breakpoint was set here at {short_path(file)}:{line}")
            del self.own[file][line]
        for file in {file for file, _ in gone}:
            self._send_breakpoints(file)
        self.screen.say(f"{len(gone)} removed")

    def _parsed(self, place: str) -> tuple[str, int]:
        file, _, line = place.rpartition(":")
        if not line.isdigit() or int(line) < 1:
            raise DapError(f"{place!r}: FILE:LINE or LINE is wanted")
        return (os.path.abspath(file) if file else self.frame.file), int(line)

    def _send_breakpoints(self, file: str) -> list[dict[str, Any]]:
        rows: Iterable[tuple[int, str]] = self.own[file].items()
        return self.dap.set_breakpoints(file, [{"line": n} | ({"condition": c} if c else {}) for n, c in rows])

    def _quit(self, _: str) -> None:
        if self.screen.is_interactive:
            answer = self.screen.read("leave? The process runs on (vime debug-attach stop ends its run) [y/N] ")
            if answer is None or answer.strip().lower() not in ("y", "yes"):
                return
        self._leave()

    def _leave(self) -> None:
        self.is_over = True
        try:
            self.dap.detach()
        except DapError:
            self.screen.say("the process has ended")
            return
        self.screen.say("detached; the process runs on")

    def _end(self, text: str) -> None:
        self.is_over = True
        self.screen.say(text)


def _place(frame: StackFrame) -> str:
    return f"{short_path(frame.file) or '?'}:{frame.line} {frame.name}"


def _in_short(value: str) -> str:
    """On one line: tensors and arrays are shown on several."""
    line = " ".join(part.strip() for part in value.splitlines())
    return line if len(line) <= SHORT else line[:SHORT] + " ..."


def _is_group(variable: Variable) -> bool:
    """debugpy puts names with underscores, functions and classes into groups of their own."""
    return variable.name in ("special variables", "function variables", "class variables", "protected variables")


def _last_line(text: str) -> str:
    """Of a traceback: the error itself."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else text
