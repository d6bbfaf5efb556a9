"""Sees to it that a run which hangs says where, unasked: stacks of all processes, whom they wait for, what is pending.

A thread of the driver looks at the phase under way once a second. It speaks once where a phase takes far longer than
usual, and ends what the waits of the main thread cannot end: code of the user that blocks the driver itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from vime.debug.everywhere import Picture, look
from vime.debug.processes import Roster
from vime.debug.stacks import frames_of
from vime.errors import EXIT_RUN_FAILED, OutOfTime

LOOK_SECONDS = 1.0
UNUSUAL_FACTOR, UNUSUAL_SECONDS, MIN_SEEN = 10.0, 60.0, 3
LAST_RESORT_SECONDS = 30.0
"""So long may a driver that was interrupted take to come back from what it is in."""


class Says(Protocol):
    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Limit:
    """``setting``: its name; ``seconds``: longest wait; ``overdue``: when the driver itself must be stuck, if known."""

    setting: str
    seconds: float
    overdue: float | None = None


@dataclass
class Phase:
    name: str
    started: float
    is_noticed: bool = False
    is_over: bool = False


@dataclass
class Watchdog:
    """Watches one run from its driver. ``folder``: the run folder; ``limits``: of each phase, by name."""

    folder: Path
    say: Says
    roster: Roster = field(default_factory=Roster)
    limits: Mapping[str, Limit] = field(default_factory=dict)
    pending: Callable[[], str] = str
    """What is being waited for in the phase that goes on, in words; "" for nothing."""
    unusual_seconds: float = UNUSUAL_SECONDS
    look_seconds: float = LOOK_SECONDS
    _seen: dict[str, list[float]] = field(default_factory=dict)
    _phase: Phase | None = None
    _overdue: OutOfTime | None = None
    _returned: threading.Event = field(default_factory=threading.Event)
    _ended: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Watch while the block runs."""
        thread = threading.Thread(target=self._watch, name="vime-watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._returned.set()
            thread.join(LAST_RESORT_SECONDS)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One phase of the loop goes on inside."""
        self._phase = phase = Phase(name, time.monotonic())
        try:
            yield
        finally:
            phase.is_over = True  # it still is the phase to speak of: what follows an error is its end
        self._phase = None
        self._seen.setdefault(name, []).append(time.monotonic() - phase.started)

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """A limit that is reached inside, while all processes are still there, becomes an error that names a culprit.

        Raises OutOfTime: the culprit on the first line, then what was waited for, then the file with the stacks.
        """
        try:
            yield
        except (KeyboardInterrupt, OutOfTime) as error:
            self._returned.set()
            if self._overdue is not None:
                raise self._overdue from None
            if isinstance(error, OutOfTime):
                raise self._explained(error) from error
            raise

    def _explained(self, error: OutOfTime) -> OutOfTime:
        picture = self._look().with_main("driver", frames_of(error))
        first = error.culprit or picture.culprit
        lines = [first] if first else []
        lines += [error.message, f"stacks of {len(picture.dumps)} processes: {self._told(picture, 'limit')}"]
        return OutOfTime("\n".join(lines), error.hint, first)

    def _look(self) -> Picture:
        return look(self.roster.members, self.roster.facts)

    def _told(self, picture: Picture, why: str) -> Path:
        """Say in short where every process is, and write it in full; returns the file."""
        name = self._phase.name if self._phase is not None else "run"
        path = self.folder / f"stacks_{name}_{why}_{time.strftime('%Y%m%d-%H%M%S')}.txt"
        try:
            path.write_text(picture.in_full(), encoding="utf-8")
        except OSError as error:  # must not hide what hangs
            self.say.warn(f"{path} cannot be written: {error.strerror}")
        self.say.note("where every process is:")
        for line in picture.short_lines():
            self.say.note(f"  {line}")
        return path

    def _watch(self) -> None:
        while not self._ended.wait(self.look_seconds):
            phase = self._phase
            if phase is None or phase.is_over:
                continue
            seconds = time.monotonic() - phase.started
            limit = self.limits.get(phase.name)
            if limit is not None and limit.overdue is not None and seconds > limit.overdue:
                self._end(phase, limit, seconds)
                return
            if not phase.is_noticed and seconds > self._unusual(phase.name):
                phase.is_noticed = True
                self._notice(phase, limit, seconds)

    def _unusual(self, name: str) -> float:
        """Seconds from which on a phase has taken far longer than before."""
        seen = self._seen.get(name, [])
        if len(seen) < MIN_SEEN:
            return float("inf")
        return max(self.unusual_seconds, UNUSUAL_FACTOR * statistics.median(seen))

    def _notice(self, phase: Phase, limit: Limit | None, seconds: float) -> None:
        usual = statistics.median(self._seen[phase.name])
        picture = self._look()
        text = f"{phase.name} goes on for {seconds:.0f} s, where it took {usual:.1f} s before"
        text += f"; {picture.culprit}" if picture.culprit else ""
        pending = self.pending()
        text += f"; pending: {pending}" if pending else ""
        if limit is not None:
            text += f"; smallest time-out left: {limit.setting}, {max(0.0, limit.seconds - seconds):.0f} s"
        self.say.warn(text)
        self.say.note(f"stacks in full: {self._told(picture, 'unusual')}")

    def _end(self, phase: Phase, limit: Limit, seconds: float) -> None:
        """The main thread does not come back by itself: interrupt it, and end the process where that does not help."""
        picture = self._look()
        path = self._told(picture, "limit")
        pending = self.pending()
        lines = [picture.culprit] if picture.culprit else []
        lines += [f"{phase.name}: the driver itself is blocked, {seconds:.0f} s after it began"]
        lines[-1] += f" ({limit.setting} = {limit.seconds:g} s)" + (f"; pending: {pending}" if pending else "")
        hint = "an async function must not block: await, or asyncio.to_thread(...)"
        lines += [f"stacks of {len(picture.dumps)} processes: {path}"]
        self._overdue = OutOfTime("\n".join(lines), hint, picture.culprit)
        os.kill(os.getpid(), signal.SIGTERM)  # ends the run as Ctrl-C does; ``explaining`` tells why
        if not self._returned.wait(LAST_RESORT_SECONDS):
            for line in (*lines, f"hint: {hint}", "it does not react to signals: the process is ended"):
                self.say.note(f"error: {line}")
            os._exit(EXIT_RUN_FAILED)  # what it has started ends with it
