"""What a walk came to: one verdict with counts, a row per check, and the findings in words."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vime.align.walk import Check
from vime.types import AlignReport, CheckResult, Verdict

COLUMNS = ("step", "check", "verdict", "measured", "limit")
FOLLOWED_WIDTH = 90
"""Of what a consequence measured, in words; the page and the JSON have all of it."""
_ORDER = (Verdict.FAIL, Verdict.WARN, Verdict.PASS, Verdict.NOT_TESTED, Verdict.SKIP)


def overall(report: AlignReport) -> Verdict:
    """The worst verdict; one that compared nothing counts only where all are such."""
    return next((verdict for verdict in _ORDER if any(c.verdict == verdict for c in report.checks)), Verdict.NOT_TESTED)


def counts(report: AlignReport) -> dict[str, int]:
    """How many checks have each verdict, the worst first."""
    found = Counter(str(check.verdict) for check in report.checks)
    return {str(verdict): found[str(verdict)] for verdict in _ORDER if found[str(verdict)]}


def line(report: AlignReport) -> str:
    """One line for all: ``FAIL: 2 FAIL (1 finding: weights), 17 PASS``."""
    parts = []
    for verdict, count in counts(report).items():
        text = f"{count} {verdict}"
        if verdict == Verdict.FAIL:
            names = [check.name for check in report.findings]
            text += f" ({len(names)} {'finding' if len(names) == 1 else 'findings'}: {', '.join(names)})"
        parts.append(text)
    return f"{overall(report)}: {', '.join(parts) or 'no check was run'}"


def rows(report: AlignReport, checks: Sequence[Check]) -> list[tuple[str, str, str, str, str]]:
    """A row for each check, see COLUMNS. What was not compared says why in place of a number."""
    steps = {check.name: check.step for check in checks}
    return [(steps[c.name], c.name, str(c.verdict), c.measured or c.cause, c.limit) for c in report.checks]


def told(report: AlignReport, checks: Sequence[Check]) -> Iterator[str]:
    """The findings in words, then the warnings: evidence, likely cause, next step; then what follows, a line each."""
    known = {check.name: check for check in checks}
    warned = [found for found in report.checks if found.verdict == Verdict.WARN]
    for found in (*report.findings, *warned):
        check = known[found.name]
        yield f"{found.verdict} {check.step} {found.name}: {check.title}"
        yield from (f"  {text}" for text in _words(found))
        yield ""
    followed = [found for found in report.checks if found.verdict == Verdict.FAIL and found.follows]
    for found in followed:
        measured = textwrap.shorten(found.measured, FOLLOWED_WIDTH, placeholder=" ...")
        yield f"FAIL {known[found.name].step} {found.name}, follows from {found.follows}: {measured}"
    if followed:
        yield ""


def _words(found: CheckResult) -> Iterator[str]:
    limit = f" (limit: {found.limit})" if found.limit else ""
    if found.measured:
        yield f"measured: {found.measured}{limit}"
    yield from (f"| {text}" for text in found.evidence)
    if found.cause:
        yield f"likely:   {found.cause}"
    if found.next_step:
        yield f"try:      {found.next_step}"


def as_dict(report: AlignReport, checks: Sequence[Check]) -> dict[str, Any]:
    """All of it as plain data."""
    known = {check.name: check for check in checks}
    return {
        "command": "align-check",
        "verdict": str(overall(report)),
        "counts": counts(report),
        "findings": [check.name for check in report.findings],
        "checks": [_check(found, known[found.name], report.seconds.get(found.name, 0.0)) for found in report.checks],
        "environment": dict(report.environment),
    }


def _check(found: CheckResult, check: Check, seconds: float) -> dict[str, Any]:
    return {
        "name": found.name,
        "step": check.step,
        "title": check.title,
        "guide": check.guide,
        "verdict": str(found.verdict),
        "measured": found.measured,
        "limit": found.limit,
        "evidence": list(found.evidence),
        "cause": found.cause,
        "next_step": found.next_step,
        "follows": found.follows,
        "seconds": round(seconds, 3),
        "numbers": plain(found.numbers),
    }


def plain(value: Any) -> Any:
    """numpy's arrays and numbers as lists and numbers of Python."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value
