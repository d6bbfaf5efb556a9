"""Fault x check: what the walk said of each planted fault, and whether it was the check meant for it that said so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vime.align.faults import FAULTS
from vime.align.walk import Check
from vime.types import AlignReport, Verdict

MARKS = {"claimed": "X", "wrong": "!", "follows": "f", "warned": "w", "passed": ".", "untested": " "}
"""How a cell of the matrix reads; of several families the first in this order."""
LEGEND = (
    "X claimed by the check meant for it, f follows from that, w a warning, . passed, blank not tested or skipped, "
    "! claimed by another check"
)
COLUMNS = ("fault", "check meant for it", "outcome", "what it said")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One walk. ``fault``: planted before it, or "" for none. ``said``: what was changed, in words.

    reason  why the fault was not planted; then there is no walk
    """

    family: str
    fault: str
    said: str = ""
    report: AlignReport = field(default_factory=lambda: AlignReport(()))
    reason: str = ""
    seconds: float = 0.0

    @property
    def meant(self) -> str:
        """The check that is there for the fault."""
        return FAULTS[self.fault].check if self.fault else ""

    @property
    def claims(self) -> tuple[str, ...]:
        return tuple(check.name for check in self.report.findings)

    @property
    def follows(self) -> tuple[str, ...]:
        return tuple(check.name for check in self.report.checks if check.follows)

    @property
    def problems(self) -> list[str]:
        """What is wrong with the walk: nothing for a fault that its check alone claims, or for a clean one."""
        where = f"{self.family}, {self.fault or 'no fault'}"
        if self.reason:
            return []
        if not self.fault:
            bad = (Verdict.FAIL, Verdict.WARN)
            return [f"{where}: {c.name} says {c.verdict}: {c.measured}" for c in self.report.checks if c.verdict in bad]
        found = [] if self.meant in self.claims else [f"{where}: not caught by {self.meant}"]
        return found + [f"{where}: {name} claims it too" for name in self.claims if name != self.meant]

    @property
    def verdict(self) -> str:
        if self.reason:
            return "not planted"
        if not self.problems:
            return "caught" if self.fault else "clean"
        return "; ".join(problem.split(": ", 1)[1] for problem in self.problems)

    @property
    def measured(self) -> str:
        """What the check meant for the fault measured, or why there was no walk."""
        own = (check for check in self.report.checks if check.name == self.meant)
        return self.reason or next((check.measured or check.cause for check in own), "")

    def kind(self, check: str) -> str:
        """Of one check, a key of MARKS."""
        found = next((each for each in self.report.checks if each.name == check), None)
        if found is None or found.verdict in (Verdict.SKIP, Verdict.NOT_TESTED):
            return "untested"
        if found.verdict == Verdict.FAIL:
            return "follows" if found.follows else "claimed" if check == self.meant else "wrong"
        return "warned" if found.verdict == Verdict.WARN else "passed"


@dataclass(frozen=True, slots=True)
class Confusion:
    """All walks of a self-test, the clean ones too.

    is_whole  every model was there, so every fault has a place
    broken    why walks of a model ended before their time
    """

    outcomes: tuple[Outcome, ...]
    checks: tuple[Check, ...]
    is_whole: bool = True
    broken: tuple[str, ...] = ()

    @property
    def problems(self) -> list[str]:
        """Every fault that was not caught by its check alone, clean walks that were not clean, faults never planted."""
        found = [problem for outcome in self.outcomes for problem in outcome.problems]
        found += self.broken
        return found + [f"{name}: planted in no model" for name in self.never_planted if self.is_whole]

    @property
    def never_planted(self) -> list[str]:
        return [f for f in self.faults if all(o.reason for o in self.outcomes if o.fault == f)]

    @property
    def families(self) -> list[str]:
        return list(dict.fromkeys(outcome.family for outcome in self.outcomes))

    @property
    def faults(self) -> list[str]:
        return list(dict.fromkeys(outcome.fault for outcome in self.outcomes if outcome.fault))

    def rows(self) -> list[tuple[str, str, str, str]]:
        """A row for each walk, see COLUMNS; a family that plants nothing else says so once."""
        steps = {check.name: check.step for check in self.checks}
        rows = []
        for o in self.outcomes:
            meant = f"{steps.get(o.meant, '?')} {o.meant}" if o.fault else ""
            rows.append((f"{o.family}: {o.fault or '(none)'}", meant, o.verdict, o.measured))
        return rows

    def matrix(self) -> list[list[str]]:
        """First row: steps of the checks. Then for each fault its name and a mark for each check, over all families."""
        order = ("wrong", "claimed", "follows", "warned", "passed", "untested")
        rows = [["fault", *(check.step for check in self.checks)]]
        for fault in ["", *self.faults]:
            walks = [o for o in self.outcomes if o.fault == fault and not o.reason]
            kinds = [{o.kind(check.name) for o in walks} for check in self.checks]
            marks = [MARKS[next((kind for kind in order if kind in found), "untested")] for found in kinds]
            rows.append([fault or "(none)", *marks])
        return rows

    def matrix_lines(self) -> list[str]:
        """The matrix in columns of text."""
        rows = self.matrix()
        width = max(len(row[0]) for row in rows)
        sizes = [max(len(row[i]) for row in rows) for i in range(1, len(rows[0]))]
        return [
            f"{row[0]:<{width}}  " + " ".join(f"{cell:>{size}}" for cell, size in zip(row[1:], sizes, strict=True))
            for row in rows
        ]

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {"problems": self.problems, "walks": [_walk(outcome) for outcome in self.outcomes]}


def _walk(outcome: Outcome) -> Mapping[str, Any]:
    return {
        "family": outcome.family,
        "fault": outcome.fault,
        "said": outcome.said,
        "meant": outcome.meant,
        "outcome": outcome.verdict,
        "claims": list(outcome.claims),
        "follows": {check.name: check.follows for check in outcome.report.checks if check.follows},
        "verdicts": {check.name: str(check.verdict) for check in outcome.report.checks},
        "measured": outcome.measured,
        "seconds": round(outcome.seconds, 2),
        "seconds_by_check": {name: round(seconds, 3) for name, seconds in outcome.report.seconds.items()},
    }


def markdown(found: Confusion) -> Iterator[str]:
    """The page of the documentation, line by line: what each fault breaks, what caught it, and the matrix."""
    steps = {check.name: check.step for check in found.checks}
    yield from _HEAD.format(command=COMMAND, families=", ".join(found.families)).splitlines()
    yield ""
    yield "| fault | what is broken | planted in | caught by | what that check said |"
    yield "|---|---|---|---|---|"
    for name, fault in FAULTS.items():
        meant = f"{steps.get(fault.check, '?')} `{fault.check}`" if fault.check else "none: it is for the watchdog"
        needs = f" (needs {fault.needs})" if fault.needs else ""
        said = next((o.measured for o in found.outcomes if o.fault == name and not o.reason), "")
        yield f"| `{name}` | {_cell(fault.description)}{needs} | {fault.place} | {meant} | {_cell(said)} |"
    yield from (
        "",
        "## Fault x check",
        "",
        f"{LEGEND}.",
        "",
        "```text",
        *map(str.rstrip, found.matrix_lines()),
        "```",
        "",
    )
    yield from ("The checks by their steps:", "")
    yield from (f"- {check.step} `{check.name}`: {check.title}" for check in found.checks)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


COMMAND = "vime align-check --self-test --markdown docs/faults.md"
_HEAD = """# Faults that vime plants, and the checks that catch them

A check that cannot fail proves nothing. `vime align-check --self-test` makes tiny models ({families}),
starts a trainer and an engine for each, walks all checks clean, then plants every fault in the live processes, walks
again and heals.
A fault must be claimed by the check that is there for it and by no other; what follows from it says so. One fault in a
run of your own: `vime align-check RUN.toml --inject FAULT`.

This page is written by `{command}`.
"""


def families_of(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """The families that are asked for, all where none is; in the order of ``known``."""
    return [name for name in known if not names or name in names]
