"""Every attempt of a search, numbered; none is made twice, and there is a limit to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vime.debug.crash.trial import Ending, Outcome, Trial

Run = Callable[[Trial], Ending]
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
        self.first: Ending | None = None
        self._run = run
        self._on_attempt = on_attempt
        self._known: dict[tuple[tuple[str, ...], tuple[int, ...]], bool | None] = {}

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
        if key not in self._known:
            self._known[key] = self._decide(trial, purpose, max(num_runs, self.repeats))
        return self._known[key]

    def _decide(self, trial: Trial, purpose: str, num_runs: int) -> bool | None:
        assert self.first is not None
        for _ in range(num_runs):
            found = self.attempt(trial, purpose)
            if found.not_applied:
                return None
            if found.ending.is_like(self.first):
                return True
            if found.ending.outcome != Outcome.SURVIVED:
                return None
        return False


def repeats_for(num_crashed: int, num_runs: int) -> int:
    """Attempts after which a crash seen in ``num_crashed`` of ``num_runs`` is overlooked in 5% of cases, 10 at most."""
    if num_crashed >= num_runs:
        return 1
    share = num_crashed / num_runs
    return min(MAX_REPEATS, math.ceil(math.log(MISSED) / math.log(1 - share)))
