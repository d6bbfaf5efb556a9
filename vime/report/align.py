"""The HTML report of ``vime align-check``: findings first, then the walk in the guide's order, plots of its numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from vime.record.export import finite
from vime.report.page import page
from vime.types import AlignReport, CheckResult, Verdict

ORDER = (Verdict.FAIL, Verdict.WARN, Verdict.PASS, Verdict.NOT_TESTED, Verdict.SKIP)
"""The verdict of the whole is the first of these that any check has."""
LIST_LENGTH = 12
NUM_NUMBERS = 400


class Described(Protocol):
    """What is known of a check before it runs, see ``vime.align.walk.Check``."""

    @property
    def name(self) -> str: ...
    @property
    def step(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def guide(self) -> str: ...


def align_page(report: AlignReport, described: Sequence[Described] = ()) -> str:
    """The page, one file. ``described``: step, title and line of the guide of each check, by its name."""
    known = {check.name: check for check in described}
    model = report.environment.get("model", "")
    data = {
        "about": model,
        "verdict": str(overall(report)),
        "summary": _summary(report),
        "environment": [[name, str(value)] for name, value in report.environment.items() if name != "model"],
        "checks": [_check(result, known.get(result.name), report.seconds.get(result.name)) for result in report.checks],
    }
    return page(f"align-check - {model}" if model else "align-check", "align", finite(data), ("base", "plots"))


def overall(report: AlignReport) -> Verdict:
    """FAIL if any check failed, else WARN if any warned, else PASS if any passed; nothing tested is no PASS."""
    found = {result.verdict for result in report.checks}
    return next((verdict for verdict in ORDER if verdict in found), Verdict.NOT_TESTED)


def _summary(report: AlignReport) -> str:
    tally = Counter(result.verdict for result in report.checks)
    counts = ", ".join(f"{tally[verdict]} {verdict}" for verdict in ORDER if tally[verdict])
    seconds = sum(report.seconds.values())
    findings = len(report.findings)
    parts = [f"{findings} finding{'s' if findings != 1 else ''}" if findings else "", counts or "no check was run"]
    return " · ".join(part for part in (*parts, f"{seconds:.0f} s" if seconds else "") if part)


def _check(result: CheckResult, about: Described | None, seconds: float | None) -> dict[str, Any]:
    numbers = dict(result.numbers)
    plots = numbers.pop("plots", ())
    return {
        "name": result.name,
        "step": about.step if about else "",
        "title": about.title if about else "",
        "guide": about.guide if about else "",
        "verdict": str(result.verdict),
        "measured": result.measured,
        "limit": result.limit,
        "evidence": list(result.evidence),
        "cause": result.cause,
        "next_step": result.next_step,
        "follows": result.follows,
        "seconds": seconds,
        "plots": list(plots),
        "numbers": _numbers(numbers),
    }


def _numbers(numbers: Mapping[str, Any]) -> list[list[Any]]:
    found = [list(entry) for entry in _flat("", numbers)]
    if len(found) > NUM_NUMBERS:
        found = [*found[:NUM_NUMBERS], ["and", f"{len(found) - NUM_NUMBERS} more"]]
    return found


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Nested names joined with dots; of a long list its length and its range."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), entry)
    elif isinstance(value, (list, tuple)):
        yield name, ", ".join(map(str, value)) if len(value) <= LIST_LENGTH else _range(value)
    else:
        yield name, value if isinstance(value, (bool, int, float, str)) or value is None else str(value)


def _range(values: Sequence[Any]) -> str:
    numbers = [v for v in values if isinstance(v, (int, float))]
    if len(numbers) < len(values):
        return f"{len(values)} entries"
    return f"{len(values)} numbers from {min(numbers):g} to {max(numbers):g}"
