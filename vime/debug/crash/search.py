"""Confirm a crash, find the settings it hangs on, then the requests: pure, over any ``Run``.

A crash that needs A and B is gone when either is changed: every single toggle that removes it is reported. One that
needs A or B is gone only when both are: a smallest such set is found by delta debugging over the toggles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from vime.debug.crash import toggles as entries
from vime.debug.crash.ddmin import Question, minimal, without, worst_case
from vime.debug.crash.found import Found, Plan, count
from vime.debug.crash.ledger import Ledger, OutOfAttempts, repeats_for
from vime.debug.crash.toggles import LEADING, Toggle
from vime.debug.crash.trial import Outcome, Phase, Trial
from vime.errors import VimeError

BATCH = "batch_size"
CONFIRM, TOGGLES, REQUESTS, LAST = "confirm", "toggles", "requests", "last"
Say = Callable[[str], None]


def search(ledger: Ledger, plan: Plan, say: Say = lambda text: None) -> Found:
    """All of it, within the limit of ``ledger``. VimeError where the run itself is refused by the engine.

    Ctrl-C ends it with what is known by then.
    """
    found = Found(requests=plan.all_requests)
    for step in (_confirm, _search, _last):
        ledger.num_kept = 1 if step is _search else 0  # for the last one
        try:
            step(ledger, plan, found, say)
        except OutOfAttempts:
            if not found.stopped:
                found.stopped = f"--max-attempts {ledger.max_attempts} reached"
                say(f"stopped: {found.stopped}")
        except KeyboardInterrupt:
            found.stopped, found.is_interrupted = "interrupted", True
        if found.is_interrupted or not found.is_reproduced:
            break
    _judge(ledger, plan, found)
    return found


def _judge(ledger: Ledger, plan: Plan, found: Found) -> None:
    """Whether the sets that were found are smallest ones: by the attempts, wherever the search ended."""
    rests = [without(found.removing_set, (toggle,)) for toggle in found.removing_set]
    found.is_set_minimal = all(ledger.answer(Trial(rest, plan.all_requests)) is True for rest in rests)
    if len(found.requests) > 1:
        parts = {i: ledger.answer(Trial((), without(found.requests, (i,)))) for i in found.requests}
        found.open_requests = tuple(i for i, answer in parts.items() if answer is not False)
    found.is_minimal = found.is_reproduced and not found.open_requests


def _search(ledger: Ledger, plan: Plan, found: Found, say: Say) -> None:
    _toggles(ledger, plan, found, say)
    _requests(ledger, plan, found, say)


# ---- the crash -------------------------------------------------------------------------------------------------------


def _confirm(ledger: Ledger, plan: Plan, found: Found, say: Say) -> None:
    try:
        for _ in range(plan.num_runs):
            attempt = ledger.attempt(Trial((), plan.all_requests), CONFIRM)
            if attempt.ending.outcome == Outcome.REFUSED:
                text = f"the engine refuses the run's own settings: {attempt.ending.cause}"
                raise VimeError(text, "this is no crash: mend [vllm]")
    finally:
        _confirmed(ledger, found)
    more = f": what survives is repeated until it has survived {ledger.repeats} times" if found.is_flaky else ""
    say(found.confirmed + more)


def _confirmed(ledger: Ledger, found: Found) -> None:
    """What most of the runs that did not survive have in common is the crash that is looked for."""
    endings = [attempt.ending for attempt in ledger.attempts]
    kinds = Counter((ending.outcome, ending.phase) for ending in endings if ending.is_crash)
    found.num_runs = len(endings)
    if kinds:
        ((most, _),) = kinds.most_common(1)
        ledger.sought = tuple(e for e in endings if (e.outcome, e.phase) == most)
        found.otherwise = [e.told for e in endings if e.is_crash and e not in ledger.sought]
        found.num_crashed = len(ledger.sought)
        found.num_repeats = ledger.repeats = repeats_for(found.num_crashed, found.num_runs)


# ---- settings --------------------------------------------------------------------------------------------------------


def _toggles(ledger: Ledger, plan: Plan, found: Found, say: Say) -> None:
    assert ledger.first is not None
    known = next((a.ending.facts for a in ledger.attempts if a.ending.facts), {})
    facts = known or {"device": ledger.first.device}
    found.toggles = entries.chosen(entries.toggles(facts, plan.num_requests), plan.only, plan.skip)
    usable = [t for t in found.toggles if not t.skip and not t.is_narrow]
    pair = leading(usable)
    if not usable:
        say("no setting can be changed here")
        return
    say(f"{count(len(usable), 'setting')} to change, one at a time: {_at_most(ledger, _bound(ledger, plan, found))}")
    for toggle in [*pair, *(t for t in usable if t not in pair)]:
        if pair and toggle == pair[-1]:
            _single(ledger, plan, found, toggle)
            if not found.removing and _asked(ledger, plan, found, pair) is False:
                found.removing_set = tuple(pair)
                say(f"gone with {' and '.join(t.name for t in pair)} changed together")
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


def _bound(ledger: Ledger, plan: Plan, found: Found) -> int:
    """Attempts where single toggles remove the crash: each, the pair, all but those, and narrower ones."""
    usable = [t for t in found.toggles if not t.skip]
    sizes = sum(t.is_narrow and t.axis == BATCH for t in usable)
    narrow = sum(t.is_narrow and t.axis != BATCH for t in usable) + sizes.bit_length()
    broad = sum(not t.is_narrow for t in usable)
    return (broad + 2) * max(ledger.repeats, plan.num_runs) + narrow * ledger.repeats


def _at_most(ledger: Ledger, num: int) -> str:
    if ledger.num_left <= 0:
        raise OutOfAttempts
    return f"at most {count(min(num, ledger.num_left), 'engine start')}"


def _single(ledger: Ledger, plan: Plan, found: Found, toggle: Toggle) -> None:
    if _asked(ledger, plan, found, [toggle]) is False:
        found.removing.append(toggle)


def _asked(ledger: Ledger, plan: Plan, found: Found, changed: Sequence[Toggle]) -> bool | None:
    """Whether the crash is there with ``changed``: gone is what is gone in as many runs as confirmed it (a narrow
    toggle: in one). None where that remains open; why is noted down.
    """
    trial = Trial(tuple(changed), plan.all_requests)
    is_narrow = any(toggle.is_narrow for toggle in changed)
    answer = ledger.crashes(trial, TOGGLES, 1 if is_narrow else plan.num_runs)
    if answer and len(changed) == 1 and changed[0] not in found.staying:
        found.staying.append(changed[0])
    attempt = ledger.attempts[-1]
    if answer is None and attempt.trial == trial:
        if attempt.not_applied and len(changed) == 1:
            found.not_applied |= attempt.not_applied
        else:
            text = "; ".join(attempt.not_applied.values()) or attempt.ending.told
            found.unknown[" + ".join(trial.names)] = text
    return answer


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
        found.is_enough = _asked(ledger, plan, found, rest)


def _smallest_set(ledger: Ledger, plan: Plan, found: Found, usable: Sequence[Toggle], say: Say) -> None:
    """No single toggle removes the crash: all of them together, and if that does, a smallest set."""
    sound = tuple(t for t in usable if t.name not in (*found.not_applied, *found.unknown))
    if len(sound) < 2:
        return
    most = _at_most(ledger, (1 + worst_case(len(sound))) * max(ledger.repeats, plan.num_runs))
    say(f"no single toggle removes it: all {len(sound)} changed together, then fewer: {most}")
    answer = _asked(ledger, plan, found, sound)
    if answer is not False:
        found.stays = answer is True
        return
    question = Question(sound, lambda changed: _asked(ledger, plan, found, changed) is False)
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
        say("it crashes before any request is sent")
        return
    most = _at_most(ledger, worst_case(plan.num_requests) * ledger.repeats)
    say(f"{count(plan.num_requests, 'request')}, how few are enough? {most.capitalize()}")
    question = Question(plan.all_requests, lambda part: ledger.crashes(Trial((), part), REQUESTS) is True)
    try:
        minimal(question)
    finally:
        found.requests = question.smallest


def _last(ledger: Ledger, plan: Plan, found: Found, say: Say) -> None:
    """The smallest case once more, where a core dump can be taken; a flaky one until it crashes."""
    assert ledger.first is not None
    if ledger.num_left <= 0:
        return
    say(f"the smallest case so far, {count(len(found.requests), 'request')}, once more, for stack and core dump")
    for _ in range(ledger.repeats):
        found.last = ledger.attempt(Trial((), found.requests, with_core_dump=True), LAST)
        if ledger.shows(found.last.ending):
            return
