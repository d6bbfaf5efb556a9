"""One attempt: what is asked of it, and how it ended."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from vime.debug.crash.toggles import Toggle

SHORT = 120
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


class Outcome(StrEnum):
    SURVIVED = "survived"  # every request was answered
    CRASHED = "crashed"  # a process was killed by a signal, or the engine raised
    HUNG = "hung"  # not done at the time limit
    REFUSED = "refused"  # vLLM takes no such settings: nothing was tried


class Phase(StrEnum):
    """How far an attempt came."""

    STARTING = "starting"
    SERVING = "serving"
    DONE = "done"


@dataclass(frozen=True)
class Trial:
    """``changed``: toggles that are otherwise than in the run; ``requests``: places in the list of all requests."""

    changed: tuple[Toggle, ...]
    requests: tuple[int, ...]
    with_core_dump: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(toggle.name for toggle in self.changed)


@dataclass(frozen=True)
class Ending:
    """How one attempt ended.

    cause     one line: "SIGSEGV in the engine core", "RuntimeError: ..."; empty where it survived
    stack     Python frames of the process that crashed or hangs, the innermost first
    facts     what the engine's worker read back of its own settings, see ``toggles``; empty where it did not come up
    device    cuda or cpu; empty where not even that is known
    seconds   wall-clock, the start of the engine included
    folder    where order, output and stacks of the attempt lie; empty where nothing is kept
    """

    outcome: Outcome
    phase: Phase = Phase.DONE
    cause: str = ""
    stack: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    device: str = ""
    seconds: float = 0.0
    folder: str = ""

    @property
    def is_crash(self) -> bool:
        return self.outcome in (Outcome.CRASHED, Outcome.HUNG)

    @property
    def signature(self) -> str:
        """What tells this crash from another: the signal and where it came, or the error; no numbers, no place."""
        return _NUMBER.sub("N", self.cause) if self.outcome == Outcome.CRASHED else ""

    @property
    def short(self) -> str:
        """The cause, as much of it as a line has room for."""
        return self.cause if len(self.cause) <= SHORT else self.cause[: SHORT - 3] + "..."

    @property
    def told(self) -> str:
        """In a few words."""
        when = f" while {self.phase}" if self.is_crash else ""
        return f"{self.outcome}{when}: {self.short}"

    def is_like(self, other: Ending) -> bool:
        """Whether this is the crash ``other``, of a run as it is: a hang is no crash, another error another crash.

        The place may differ (with other settings the same fault of a kernel surfaces elsewhere), and what crashed at
        the start may now crash later; what did not has come further than this.
        """
        if not (self.is_crash and self.outcome == other.outcome and self.signature == other.signature):
            return False
        return self.phase == other.phase or other.phase == Phase.STARTING
