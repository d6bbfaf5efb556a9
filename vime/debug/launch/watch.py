"""While a debug run goes on: what has stopped is said within two seconds, and Ctrl-C is answered (case D03)."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

from vime.debug.attach import listing, sessions
from vime.debug.attach.sessions import Session
from vime.debug.stop.linger import ENDING
from vime.debug.stop.records import Run, Stop, forget_stop, put_run, release, stops
from vime.debug.stop.registry import Registry, rows
from vime.debug.stop.say import SAID
from vime.debug.stop.worker import PROOF
from vime.errors import VimeError

LOOK_SECONDS = 0.5
POLL_SECONDS = 0.1
INTERRUPTED = 128
QUESTION = "resume everything that has stopped and go on (r), or end the debug run (e)?"


class Started(Protocol):
    """A command that was started: ``LocalCommand`` or ``SubmittedJob``."""

    @property
    def registry(self) -> Registry | None: ...

    def ended(self) -> int | None: ...

    def stop(self, is_urgent: Callable[[], bool]) -> None: ...


@dataclass
class Signals:
    """Ctrl-C, SIGTERM and SIGHUP as numbers to be looked at, not as exceptions in the middle of something."""

    received: list[int] = field(default_factory=list)
    is_asking: bool = False
    handled: int = 0

    @property
    def is_new(self) -> bool:
        return len(self.received) > self.handled

    def take(self) -> int:
        """The latest signal; those before it are answered with it."""
        self.handled = len(self.received)
        return self.received[-1]

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)
        if self.is_asking and number == signal.SIGINT:
            raise KeyboardInterrupt

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Signals are received in here."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before: dict[int, Any] = {number: signal.signal(number, self._receive) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass
class Watch:
    """Looks at a debug run. ``say``: a line for the user; ``ask``: a question to a terminal, None without one.

    seen      (key, Unix time) of the stops that were said
    of_point  how many of them, by point
    is_noted  whether the registry, once it is known, has been told of this run
    """

    run: Run
    say: Callable[[str], None]
    ask: Callable[[str], str] | None
    signals: Signals
    seen: set[tuple[str, float]] = field(default_factory=set)
    of_point: dict[str, int] = field(default_factory=dict)
    is_noted: bool = False
    _looked: float = 0.0
    _said: set[str] = field(default_factory=set)

    def until_ended(self, started: Started) -> int:
        """Exit code of the command, or 128 + number of the signal by which the user ended it."""
        while (code := started.ended()) is None:
            if self.signals.is_new and (number := self._answer(started)):
                return INTERRUPTED + number
            if time.monotonic() - self._looked > LOOK_SECONDS and started.registry is not None:
                self._looked = time.monotonic()
                self._look(started.registry)
            time.sleep(POLL_SECONDS)
        return code

    def _look(self, registry: Registry) -> None:
        try:
            self._tell(registry)
        except VimeError as error:
            self._say_once(f"{error.message}: until it answers again, nothing that stops is told")

    def _tell(self, registry: Registry) -> None:
        if not self.is_noted:
            put_run(registry, self.run)
            self.is_noted = True
        for name in registry.names(f"{self.run.session}/{PROOF}/"):
            if (found := registry.get(name)) is not None:
                at = f"pid {found['pid']} at {found['address']}"
                self._say_once(f"a worker ({at}) has RAY_DEBUG_POST_MORTEM={found['value']}")
        for _, value in rows(registry, f"{self.run.session}/{SAID}/"):
            self._say_once(value["text"])
        now = [stop for stop in stops(registry, self.run.session) if self._is_there(registry, stop)]
        new = [stop for stop in now if (stop.key, stop.since) not in self.seen]
        for stop in new:
            self.seen.add((stop.key, stop.since))
            self.of_point[stop.point] = self.of_point.get(stop.point, 0) + 1
            is_last = stop is new[-1]
            session = Session(self.run.session, registry, self.run, tuple(now))
            behind = listing.behind_lines(session) if is_last else ()
            for line in listing.announcement(stop, registry, behind):
                self.say(line)

    def _is_there(self, registry: Registry, stop: Stop) -> bool:
        """Of this machine; those of others are pruned by ``list``, which asks Ray for them."""
        if not sessions.is_here(stop) or stop.member.is_alive:
            return True
        forget_stop(registry, stop)
        return False

    def _answer(self, started: Started) -> int:
        """Signal by which the run was ended; 0 where it goes on."""
        number = self.signals.take()
        if number == signal.SIGINT and self.ask is not None and self._goes_on(started):
            return 0
        self.say(f"{signal.Signals(number).name}: the debug run ends, with every process of it")
        if started.registry is not None:
            with suppress(VimeError):  # a cluster that has gone: nothing of it waits either
                started.registry.put(f"{self.run.session}/{ENDING}", {"signal": number})
        started.stop(lambda: self.signals.is_new)
        return number

    def _goes_on(self, started: Started) -> bool:
        assert self.ask is not None
        self.signals.is_asking = True
        try:
            answer = self.ask(QUESTION).strip().lower()
        except (KeyboardInterrupt, EOFError):
            return False
        finally:
            self.signals.is_asking = False
            self.signals.take()
        if answer[:1] != "r":
            return False
        waiting = [] if started.registry is None else stops(started.registry, self.run.session)
        if started.registry is not None:
            release(started.registry, waiting)
        self.say(f"{len(waiting)} resumed; points stay where they are")
        return True

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)
