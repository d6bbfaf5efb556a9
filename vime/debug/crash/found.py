"""What is searched for a crash, and what has been found of it so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from vime.debug.crash.ledger import Attempt
from vime.debug.crash.toggles import Toggle


@dataclass
class Found:
    """What a search has found so far.

    num_crashed   of ``num_runs`` of the run as it is, those that were made
    otherwise     how others of them ended that neither showed this crash nor survived
    num_repeats   attempts that have to survive before the crash counts as gone
    toggles       those of the axes asked for, SKIP among them
    removing      single toggles that remove the crash, narrower ones among them
    staying       single toggles with which it was seen
    removing_set  a set that removes it where no single one does
    is_set_minimal  it was seen with any one of ``removing_set`` left as it is
    is_enough     whether the crash stays with everything changed but ``removing``; None: not tried, or not known
    stays         it stays with all toggles changed together
    requests      a smallest set of requests that shows it
    is_minimal    without any one of ``requests`` it was not seen
    open_requests those of which that is not known: without one of them the engine ended otherwise, or it was not tried
    stopped       why the search ended early; empty: it did not
    is_interrupted  by Ctrl-C, or told to end
    """

    num_runs: int = 0
    num_crashed: int = 0
    otherwise: list[str] = field(default_factory=list)
    num_repeats: int = 1
    toggles: list[Toggle] = field(default_factory=list)
    not_applied: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    removing: list[Toggle] = field(default_factory=list)
    staying: list[Toggle] = field(default_factory=list)
    removing_set: tuple[Toggle, ...] = ()
    is_set_minimal: bool = False
    is_enough: bool | None = None
    stays: bool = False
    requests: tuple[int, ...] = ()
    is_minimal: bool = False
    open_requests: tuple[int, ...] = ()
    last: Attempt | None = None
    stopped: str = ""
    is_interrupted: bool = False

    @property
    def is_reproduced(self) -> bool:
        return self.num_crashed > 0

    @property
    def is_flaky(self) -> bool:
        return 0 < self.num_crashed < self.num_runs

    @property
    def confirmed(self) -> str:
        """How often it was seen in the run as it is."""
        if not self.is_reproduced:
            return f"not reproduced in {count(self.num_runs, 'run')}"
        return f"crashed in {self.num_crashed} of {self.num_runs}{', flaky' if self.is_flaky else ''}"


def count(num: int, what: str) -> str:
    """So many: 1 request, 2 requests."""
    return f"{num} {what}{'s' if num != 1 else ''}"


@dataclass(frozen=True)
class Plan:
    """How much to search. ``only``, ``skip``: axes."""

    num_requests: int
    num_runs: int = 3
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()

    @property
    def all_requests(self) -> tuple[int, ...]:
        return tuple(range(self.num_requests))
