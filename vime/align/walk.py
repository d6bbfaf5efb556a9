"""The guide's walk: every check in its order, nothing stopped that can still be learned from."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from string import ascii_lowercase

from vime.align.bench import Bench, Unavailable
from vime.errors import UsageError, VimeError
from vime.types import AlignReport, CheckResult, Verdict


@dataclass(frozen=True, slots=True)
class Check:
    """One check of the walk.

    name      what ``--only`` and ``--skip`` call it
    step      its place in the walk: "1", "8c"
    title     what it finds out, for people
    guide     the line of the debug guide that it answers
    run       the check itself
    is_live   it needs a live engine; with ``--from-record`` it is skipped
    of_trainer     it asks for the trainer and files alone: a walk of such checks starts no engine
    explained_by   checks whose failure explains a failure of this one, unless its result says which do
    """

    name: str
    step: str
    title: str
    guide: str
    run: Callable[[Bench], CheckResult]
    is_live: bool = False
    explained_by: tuple[str, ...] = ()
    of_trainer: bool = False

    @property
    def needs(self) -> str:
        """What must run for it."""
        if self.is_live:
            return "a live engine"
        return "the trainer" if self.of_trainer else "a rollout, live or saved"


def chosen(checks: Sequence[Check], only: Sequence[str], skip: Sequence[str]) -> list[Check]:
    """The checks that are asked for, in their order. UsageError for a name that is none, and where none is left."""
    if unknown := [name for name in (*only, *skip) if not any(_is_one_of(check, [name]) for check in checks)]:
        names = ", ".join(f"{check.step} {check.name}" for check in checks)
        raise UsageError(f"{unknown[0]!r} is no check", f"known: {names}")
    found = [c for c in checks if (not only or _is_one_of(c, only)) and not _is_one_of(c, skip)]
    if not found:
        raise UsageError("no check is left: --skip names every one that --only asks for", "--list names the checks")
    return found


def _is_one_of(check: Check, names: Sequence[str]) -> bool:
    """By name, by step, or by the number of its step: 8 stands for 8, 8a, 8b, ..."""
    return bool({check.name, check.step, check.step.rstrip(ascii_lowercase)} & set(names))


def walk(
    checks: Sequence[Check], bench: Bench, hear: Callable[[Check, CheckResult | None], None] = lambda *_: None
) -> AlignReport:
    """Run ``checks`` in order. ``hear`` is told of each before (None) and after it ran."""
    results: list[CheckResult] = []
    seconds: dict[str, float] = {}
    for check in checks:
        hear(check, None)
        bench.check = check.name
        began = time.perf_counter()
        result = replace(_result(check, bench), name=check.name)
        result = replace(result, follows=_explanation(check, result, results))
        seconds[check.name] = time.perf_counter() - began
        results.append(result)
        hear(check, result)
    found = zip(checks, results, strict=True)  # now also by failures that came later
    return AlignReport(tuple(replace(r, follows=_explanation(c, r, results)) for c, r in found), {}, seconds)


def _result(check: Check, bench: Bench) -> CheckResult:
    if check.is_live and not bench.is_live:
        return CheckResult(check.name, Verdict.SKIP, cause="needs a live engine; the rollout is a recorded one")
    try:
        return check.run(bench)
    except Unavailable as error:
        return CheckResult(check.name, Verdict.NOT_TESTED, cause=error.message)
    except VimeError as error:
        first, *more = error.message.splitlines() or [type(error).__name__]
        return CheckResult(
            check.name, Verdict.FAIL, first, "", tuple(more[:5]),
            "what this check asked for could not be done", error.hint or "see the error",
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001 - told with its traceback; what the other checks found is not lost with it
        trace = tuple(traceback.format_exc().splitlines()[-7:])
        return CheckResult(
            check.name, Verdict.FAIL, f"{type(error).__name__}: {error}", "", trace,
            "a fault of vime: this check broke, which says nothing of the run", "report it with the lines above",
            explained_by=(),
        )  # fmt: skip


def _explanation(check: Check, result: CheckResult, others: Sequence[CheckResult]) -> str:
    """The failure that explains this one; of several, the first in the walk."""
    if result.verdict != Verdict.FAIL or result.follows:
        return result.follows
    failed: Iterator[str] = (r.name for r in others if r.verdict == Verdict.FAIL and not r.follows)
    known = check.explained_by if result.explained_by is None else result.explained_by
    return next((name for name in failed if name in known), "")
