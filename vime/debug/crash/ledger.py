"""Every attempt of a search, numbered; none is made twice, and there is a limit to them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vime.debug.crash.trial import Ending, Outcome, Trial

Run = Callable[[Trial], Ending]
Key = tuple[tuple[str, ...], tuple[int, ...]]
"""Names of what is changed, and requests."""
MISSED = 0.05
"""A crash that comes in a share of the runs is looked for until it would be overlooked this seldom."""
MAX_REPEATS = 10


class OutOfAttempts(Exception):
    """The limit of engine starts is reached."""


@dataclass(frozen=True)
class Attempt:
    """``not_applied``: toggle -> what the worker reads instead; such an attempt is no evidence. ``purpose``: why it was
    made: confirm, toggles, requests, last.
    """

    number: int
    purpose: str
    trial: Trial
    ending: Ending
    not_applied: Mapping[str, str] = field(default_factory=dict)


class Ledger:
    """``run`` makes an attempt. ``repeats``: attempts before a trial counts as survived, more than one if flaky;
    ``num_kept``: attempts that are kept back for later.
    """

    def __init__(
        self, run: Run, max_attempts: int, on_attempt: Callable[[Attempt], None] = lambda attempt: None
    ) -> None:
        self.attempts: list[Attempt] = []
        self.max_attempts = max_attempts
        self.num_kept = 0
        self.repeats = 1
        self.sought: tuple[Ending, ...] = ()
        self._run = run
        self._on_attempt = on_attempt
        self._known: dict[Key, bool | None] = {}
        self._num_survived: Counter[Key] = Counter()

    @property
    def first(self) -> Ending | None:
        """The crash that is looked for, as it was seen first."""
        return self.sought[0] if self.sought else None

    def shows(self, ending: Ending) -> bool:
        """Whether it is the crash that is looked for, in one of the shapes in which the run as it is showed it."""
        return any(ending.is_like(seen) for seen in self.sought)

    @property
    def num_left(self) -> int:
        return self.max_attempts - self.num_kept - len(self.attempts)

    def attempt(self, trial: Trial, purpose: str) -> Attempt:
        """Make it. Raises OutOfAttempts at the limit."""
        if self.num_left <= 0:
            raise OutOfAttempts
        ending = self._run(trial)
        wrong = {toggle.name: toggle.unread(ending.facts) for toggle in trial.changed} if ending.facts else {}
        found = Attempt(
            len(self.attempts) + 1, purpose, trial, ending, {name: text for name, text in wrong.items() if text}
        )
        self.attempts.append(found)
        self._on_attempt(found)
        return found

    def crashes(self, trial: Trial, purpose: str, num_runs: int = 1) -> bool | None:
        """Whether it shows the crash that was confirmed; None where the attempts say neither yes nor no.

        What survives is repeated until it has survived ``num_runs`` times, more where the crash is flaky.
        They do not where the settings were refused, are not in force in the worker, or something else went wrong.
        """
        key = trial.names, trial.requests
        while key not in self._known and self._num_survived[key] < max(num_runs, self.repeats):
            found = self.attempt(trial, purpose)
            if found.not_applied:
                self._known[key] = None
            elif found.ending.outcome == Outcome.SURVIVED:
                self._num_survived[key] += 1
            else:
                self._known[key] = True if self.shows(found.ending) else None
        return self._known.get(key, False)

    def answer(self, trial: Trial) -> bool | None:
        """What ``crashes`` said of it; None also where it was not asked, or not to the end."""
        key = trial.names, trial.requests
        return self._known.get(key, None if self._num_survived[key] < self.repeats else False)


def repeats_for(num_crashed: int, num_runs: int) -> int:
    """Attempts after which a crash seen in ``num_crashed`` of ``num_runs`` is overlooked in 5% of cases, 10 at most."""
    if num_crashed >= num_runs:
        return 1
    share = num_crashed / num_runs
    return min(MAX_REPEATS, math.ceil(math.log(MISSED) / math.log(1 - share)))
