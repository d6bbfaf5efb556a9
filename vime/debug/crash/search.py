"""Confirm a crash, find the settings it hangs on, then the requests: pure, over any ``Run``.

A crash that needs A and B is gone when either is changed: every single toggle that removes it is reported. One that
needs A or B is gone only when both are: a smallest such set is found by delta debugging over the toggles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vime.debug.crash import toggles as entries
from vime.debug.crash.ddmin import Question, minimal, worst_case
from vime.debug.crash.ledger import Attempt, Ledger, OutOfAttempts, repeats_for
from vime.debug.crash.toggles import LEADING, Toggle
from vime.debug.crash.trial import Outcome, Phase, Trial
from vime.errors import VimeError

BATCH = "batch_size"
CONFIRM, TOGGLES, REQUESTS, LAST = "confirm", "toggles", "requests", "last"
Say = Callable[[str], None]


@dataclass
class Found:
    """What a search has found so far.

    num_crashed   of ``num_runs`` of the run as it is
    num_repeats   attempts that have to survive before the crash counts as gone
    toggles       those of the axes asked for, SKIP among them
    removing      single toggles that remove the crash, narrower ones among them
    removing_set  a smallest set that removes it where no single one does
    is_enough     whether the crash stays with everything changed but ``removing``; None: not tried, or not known
    stays         it stays with all toggles changed together
    requests      a smallest set of requests that shows it
    is_minimal    no single one of ``requests`` can be left out
    stopped       why the search ended early; empty: it did not
    """

    num_runs: int
    num_crashed: int = 0
    num_repeats: int = 1
    toggles: list[Toggle] = field(default_factory=list)
    not_applied: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    removing: list[Toggle] = field(default_factory=list)
    removing_set: tuple[Toggle, ...] = ()
    is_enough: bool | None = None
    stays: bool = False
    requests: tuple[int, ...] = ()
    is_minimal: bool = False
    last: Attempt | None = None
    stopped: str = ""

    @property
    def is_reproduced(self) -> bool:
        return self.num_crashed > 0

    @property
    def is_flaky(self) -> bool:
        return 0 < self.num_crashed < self.num_runs


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


def search(ledger: Ledger, plan: Plan, say: Say = lambda text: None) -> Found:
    """All of it, within the limit of ``ledger``. VimeError where the run itself is refused by the engine."""
    found = Found(plan.num_runs, requests=plan.all_requests)
    for step in (_confirm, _search, _last):
        ledger.num_kept = 1 if step is _search else 0  # for the last one
        try:
            step(ledger, plan, found, say)
        except OutOfAttempts:
            found.stopped = f"--max-attempts {ledger.max_attempts} reached"
            say(f"stopped: {found.stopped}")
        if not found.is_reproduced:
            break
    return found


def _search(ledger: Ledger, plan: Plan, found: Found, say: Say) -> None:
    _toggles(ledger, plan, found, say)
    _requests(ledger, plan, found, say)


# ---- the crash -------------------------------------------------------------------------------------------------------


def _confirm(ledger: Ledger, plan: Plan, found: Found, say: Say) -> None:
    for _ in range(plan.num_runs):
        ending = ledger.attempt(Trial((), plan.all_requests), CONFIRM).ending
        if ending.outcome == Outcome.REFUSED:
            text = f"the engine refuses the run's own settings: {ending.cause}"
            raise VimeError(text, "this is no crash: mend [vllm]")
        if ending.is_crash and ledger.first is None:
            ledger.first = ending
        if ledger.first is not None and ending.is_like(ledger.first):
            found.num_crashed += 1
    if found.is_reproduced:
        found.num_repeats = ledger.repeats = repeats_for(found.num_crashed, plan.num_runs)
    text = f"crashed in {found.num_crashed} of {plan.num_runs}"
    if not found.is_reproduced:
        text = f"not reproduced in {plan.num_runs} run{'s' if plan.num_runs > 1 else ''}"
    elif found.is_flaky:
        text += f": flaky, what survives is repeated until it has survived {ledger.repeats} times"
    say(text)


# ---- settings --------------------------------------------------------------------------------------------------------


def _toggles(ledger: Ledger, plan: Plan, found: Found, say: Say) -> None:
    assert ledger.first is not None
    known = next((a.ending.facts for a in ledger.attempts if a.ending.facts), {})
    facts = known or {"device": ledger.first.device}
    found.toggles = entries.chosen(entries.toggles(facts, plan.num_requests), plan.only, plan.skip)
    usable = [t for t in found.toggles if not t.skip and not t.is_narrow]
    pair = leading(usable)
    bound = (len(usable) + 2) * max(ledger.repeats, plan.num_runs)
    say(f"{len(usable)} settings to change, one at a time: at most {bound} engine starts")
    for toggle in [*pair, *(t for t in usable if t not in pair)]:
        if pair and toggle == pair[-1]:
            _single(ledger, plan, found, toggle)
            if not found.removing and _removes(ledger, plan, found, pair):
                found.removing_set = tuple(pair)
                say(f"gone only with {' and '.join(t.name for t in pair)} changed together")
        else:
            _single(ledger, plan, found, toggle)
    if found.removing:
        found.removing_set = ()
        _narrow(ledger, plan, found)
        _rest(ledger, plan, found, usable)
    elif not found.removing_set:
        _smallest_set(ledger, plan, found, usable, say)


def leading(usable: Sequence[Toggle]) -> list[Toggle]:
    """The pair to cross first; empty where one of the two cannot be changed."""
    names = {t.axis: t for t in usable}
    graphs = [names[axis] for axis in LEADING[0] if axis in names]
    return [graphs[0], names[LEADING[1]]] if graphs and LEADING[1] in names else []


def _single(ledger: Ledger, plan: Plan, found: Found, toggle: Toggle) -> None:
    if _removes(ledger, plan, found, [toggle]):
        found.removing.append(toggle)


def _removes(ledger: Ledger, plan: Plan, found: Found, changed: Sequence[Toggle]) -> bool:
    """Whether the crash is gone with ``changed``, in as many runs as confirmed it; what remains open is noted down."""
    trial = Trial(tuple(changed), plan.all_requests)
    is_narrow = any(toggle.is_narrow for toggle in changed)
    answer = ledger.crashes(trial, TOGGLES, 1 if is_narrow else plan.num_runs)
    attempt = ledger.attempts[-1]
    if answer is None and attempt.trial == trial:
        found.not_applied |= attempt.not_applied
        if not attempt.not_applied:
            found.unknown[" + ".join(trial.names)] = f"{attempt.ending.outcome}: {attempt.ending.cause}"
    return answer is False


def _narrow(ledger: Ledger, plan: Plan, found: Found) -> None:
    """Of each axis that removes the crash, its narrower toggles; of batch sizes, the largest that does."""
    hit = {t.axis for t in found.removing}
    narrow = [t for t in found.toggles if t.is_narrow and not t.skip and t.axis in hit]
    for toggle in [t for t in narrow if t.axis != BATCH]:
        _single(ledger, plan, found, toggle)
    sizes = [t for t in narrow if t.axis == BATCH]
    low, high = 0, len(sizes)  # sizes[:low] remove it, sizes[high:] do not
    while low < high:
        middle = (low + high) // 2
        before = len(found.removing)
        _single(ledger, plan, found, sizes[middle])
        low, high = (middle + 1, high) if len(found.removing) > before else (low, middle)


def _rest(ledger: Ledger, plan: Plan, found: Found, usable: Sequence[Toggle]) -> None:
    """Everything changed but what removes the crash: if it stays, it needs nothing else that was tried."""
    hit = {t.axis for t in found.removing}
    rest = [t for t in usable if t.axis not in hit and t.name not in (*found.not_applied, *found.unknown)]
    if rest:
        answer = ledger.crashes(Trial(tuple(rest), plan.all_requests), TOGGLES)
        found.is_enough = answer


def _smallest_set(ledger: Ledger, plan: Plan, found: Found, usable: Sequence[Toggle], say: Say) -> None:
    """No single toggle removes the crash: all of them together, and if that does, a smallest set."""
    sound = tuple(t for t in usable if t.name not in (*found.not_applied, *found.unknown))
    if len(sound) < 2:
        return
    say(f"no single toggle removes it: all {len(sound)} changed together")
    answer = ledger.crashes(Trial(sound, plan.all_requests), TOGGLES)
    if answer is not False:
        found.stays = answer is True
        return
    question = Question(sound, lambda changed: _removes(ledger, plan, found, changed))
    try:
        found.removing_set = minimal(question)
    except OutOfAttempts:
        found.removing_set = question.smallest
        raise


# ---- requests --------------------------------------------------------------------------------------------------------


def _requests(ledger: Ledger, plan: Plan, found: Found, say: Say) -> None:
    """A smallest set, under the run's own settings."""
    assert ledger.first is not None
    if ledger.first.phase == Phase.STARTING:
        found.requests = ()
        found.is_minimal = True
        say("it crashes before any request is sent")
        return
    bound = min(worst_case(plan.num_requests) * ledger.repeats, ledger.num_left)
    say(f"{plan.num_requests} requests, how few are enough? At most {bound} engine starts")
    question = Question(plan.all_requests, lambda part: ledger.crashes(Trial((), part), REQUESTS) is True)
    try:
        found.requests = minimal(question)
        found.is_minimal = True
    finally:
        found.requests = question.smallest


def _last(ledger: Ledger, plan: Plan, found: Found, say: Say) -> None:
    """The smallest case once more, where a core dump can be taken; a flaky one until it crashes."""
    assert ledger.first is not None
    if ledger.num_left <= 0:
        return
    say(f"the smallest case, {len(found.requests)} requests, once more, for its stack and its core dump")
    for _ in range(ledger.repeats):
        found.last = ledger.attempt(Trial((), found.requests, with_core_dump=True), LAST)
        if found.last.ending.is_like(ledger.first):
            return
