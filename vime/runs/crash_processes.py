"""Processes of attempts: each in a session of its own, with a limit of time, ended by its pid, whatever it does."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.backends.vllm.environment import ALWAYS, ON_CPU
from vime.debug.crash import traces
from vime.debug.crash.trial import Ending, Outcome, Phase
from vime.debug.processes import Member, family, pids, stat
from vime.debug.stacks import Dump, dump_all, in_full
from vime.errors import VimeError
from vime.runs.crash_attempt import OUTPUT, RESULT

MODULE = "vime.runs.crash_attempt"
STACKS = "stacks.txt"
ENDING_SECONDS = 20.0
STARTING_SECONDS = 300.0
LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Ended:
    """``status``: exit code, negative for a signal; None where the limit came first. ``dumps``: where it hung."""

    status: int | None
    seconds: float
    dumps: tuple[Dump, ...] = ()


@dataclass(frozen=True)
class Limits:
    """Longest time until the engine is up, and from then on."""

    start_seconds: float
    serve_seconds: float


class Deadline:
    """Of one attempt, which writes down in ``folder`` when its engine is up."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.limits = limits
        self._folder = folder
        self._began = time.monotonic()
        self._is_up_since: float | None = None

    @property
    def seconds_left(self) -> float:
        if self._is_up_since is None and _phase(_notes(self._folder)) != Phase.STARTING:
            self._is_up_since = time.monotonic()
        if self._is_up_since is None:
            return self._began + self.limits.start_seconds - time.monotonic()
        return self._is_up_since + self.limits.serve_seconds - time.monotonic()

    @property
    def next_look(self) -> float:
        """Seconds until it is asked again; 0 once it is over."""
        return max(0.0, min(LOOK_SECONDS, self.seconds_left))


class Processes:
    """Starts attempts. ``close`` ends what is left."""

    def __init__(self, limits: Limits, temp_dir: Path) -> None:
        self.limits = limits
        self._temp_dir = temp_dir
        self._environment = {**os.environ, "TMPDIR": str(temp_dir), "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
        self._warm: Warm | None = None
        self._is_unfit = False

    def run(self, order: Path, environment: Mapping[str, str]) -> Ended:
        """To its end, or to the limit. What needs an ``environment`` of its own is never forked."""
        if not environment and not self._is_unfit:
            if self._warm is None:
                read_by_libraries = {**self._environment, **ALWAYS, **ON_CPU}
                self._warm = Warm(read_by_libraries, self._temp_dir / OUTPUT)
                self._is_unfit = not self._warm.is_fit
            if not self._is_unfit:
                return self._warm.run(order, Deadline(order.parent, self.limits))
            self._warm.close()
        return self._fresh(order, environment)

    def _fresh(self, order: Path, environment: Mapping[str, str]) -> Ended:
        began, deadline = time.monotonic(), Deadline(order.parent, self.limits)
        with open(order.with_name(OUTPUT), "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(os.getpid()), str(order)],
                env={**self._environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        dumps: tuple[Dump, ...] = ()
        status: int | None = None
        try:
            while status is None and (seconds := deadline.next_look):
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(seconds)
            dumps = _dumps(process.pid) if status is None else ()
        finally:
            end_session(process.pid)
            process.wait(ENDING_SECONDS)
        return Ended(status, time.monotonic() - began, dumps)

    def close(self) -> None:
        if self._warm is not None:
            self._warm.close()


class Warm:
    """A process that has vLLM loaded and forks attempts."""

    def __init__(self, environment: Mapping[str, str], output: Path) -> None:
        self._output = output
        theirs, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        with open(output, "wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(os.getpid()), "--warm", str(theirs), str(answers)],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                pass_fds=(theirs, answers),
                start_new_session=True,
            )
        os.close(theirs)
        os.close(answers)
        self._rest = b""
        self._running: int | None = None
        self.is_fit = self._line(time.monotonic() + STARTING_SECONDS) == "ready"

    def run(self, order: Path, deadline: Deadline) -> Ended:
        began = time.monotonic()
        os.write(self._orders, f"{order}\n".encode())
        pid = self._running = self._number("pid", began + STARTING_SECONDS)
        status = None
        while status is None and (seconds := deadline.next_look):
            status = self._number("exit", time.monotonic() + seconds)
        dumps = _dumps(pid or 0) if status is None else ()
        end_session(pid or 0)
        if status is None:
            self._number("exit", time.monotonic() + ENDING_SECONDS)
        self._running = None
        return Ended(status, time.monotonic() - began, dumps)

    def close(self) -> None:
        """May be called twice."""
        if self._orders < 0:
            return
        os.close(self._orders)
        os.close(self._answers)
        self._orders = -1
        if self._running is not None:
            end_session(self._running)
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait(ENDING_SECONDS)

    def _number(self, word: str, deadline: float) -> int | None:
        line = self._line(deadline)
        if line is None:
            return None
        found, _, number = line.partition(" ")
        if found != word:
            raise VimeError(f"the process that forks attempts said {line!r}, not {word!r}")
        return int(number)

    def _line(self, deadline: float) -> str | None:
        """None at the deadline. VimeError where the process has ended."""
        while b"\n" not in self._rest:
            if not select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            got = os.read(self._answers, 4096)
            if not got:
                code = self._process.wait(ENDING_SECONDS)
                trace = traces.find(self._output.read_text(encoding="utf-8", errors="replace"))
                why = f": {trace.what}" if trace is not None else ""
                raise VimeError(f"the process that forks attempts ended with exit code {code}{why}")
            self._rest += got
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()


# ---- how it ended ----------------------------------------------------------------------------------------------------


def ending(folder: Path, ended: Ended, limits: Limits) -> Ending:
    """What the attempt wrote, how its processes ended, and what they wrote on stderr, put together."""
    notes = _notes(folder)
    text = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace") if (folder / OUTPUT).exists() else ""
    phase = _phase(notes)
    rest: dict[str, Any] = {
        "facts": notes.get("facts", {}),
        "device": notes.get("device", ""),
        "seconds": ended.seconds,
        "folder": str(folder),
    }
    outcome = notes.get("outcome")
    limit = limits.start_seconds if phase == Phase.STARTING else limits.serve_seconds
    late = f"no end within {limit:g} s" if ended.status is None else ""
    if outcome is None and late:
        stack = _hung_at(ended.dumps)
        where = f" in {stack[0]}" if stack else ""
        (folder / STACKS).write_text(in_full(ended.dumps), encoding="utf-8")
        return Ending(Outcome.HUNG, phase, f"{late}{where}", stack, **rest)
    if outcome in ("survived", "refused"):
        after = late or (f"it ended with exit code {ended.status}" if ended.status else "")
        cause = notes.get("cause", "") or (f"all answered, but {after}" if after else "")
        return Ending(Outcome(outcome), phase, cause, **rest)
    trace = traces.find(text)
    return Ending(Outcome.CRASHED, phase, _cause(notes, ended, trace), trace.frames if trace else (), **rest)


def _cause(notes: Mapping[str, Any], ended: Ended, trace: traces.Trace | None) -> str:
    signals = [-code for code in notes.get("exit_codes", []) if code is not None and code < 0]
    if signals:
        return _killed(signals[0], "the engine core")
    if ended.status is not None and ended.status < 0:
        return _killed(-ended.status, "the process that asks the engine")
    if trace is not None:
        return f"{trace.what} in a worker" if trace.is_signal else trace.what
    return notes.get("cause") or f"exit code {ended.status}, and nothing said why"


def _killed(number: int, where: str) -> str:
    name = signal.Signals(number).name
    sent = " (from outside: by the kernel, out of memory, or by hand)" if number == signal.SIGKILL else ""
    return f"{name} in {where}{sent}"


def _phase(notes: Mapping[str, Any]) -> Phase:
    return Phase(notes.get("phase", Phase.STARTING))


def _notes(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


def _dumps(pid: int) -> tuple[Dump, ...]:
    return tuple(dump_all(family([Member.here("engine", 0, pid)])))


def _hung_at(dumps: tuple[Dump, ...]) -> tuple[str, ...]:
    """The main thread of the engine's own process, else of the one that asks it."""
    known = [dump for dump in dumps if dump.threads]
    cores = [dump for dump in known if dump.who.role != "engine"]
    first = next(iter([*cores, *known]), None)
    return () if first is None else tuple(str(frame) for frame in first.threads[0].frames)


def end_session(session: int) -> None:
    """Kill every process of this session, by its pid, and wait for their end. VimeError for one that stays."""
    deadline = time.monotonic() + ENDING_SECONDS
    while members := session_members(session):
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise VimeError(f"processes {members} of an attempt do not end", "end them, or restart the machine")
        time.sleep(0.02)


def session_members(session: int) -> list[int]:
    """Living processes of a session; none for 0."""
    found = []
    for pid in pids() if session > 0 else []:
        state, _, _, its, *_ = stat(pid)
        if int(its) == session and state not in "XZ":
            found.append(pid)
    return found
