"""What a search found, for people and as plain data."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vime.debug.crash.core_dump import CoreDump
from vime.debug.crash.ledger import Attempt
from vime.debug.crash.search import LAST, REQUESTS, Found
from vime.debug.crash.toggles import Toggle
from vime.debug.crash.trial import Ending, Outcome, Phase
from vime.types import CheckResult, Verdict

CRASH, NOT_REPRODUCED = "CRASH", "NOT REPRODUCED"
EXCERPT = 60
NUM_FRAMES = 8
COMMAND = "rollout --bisect-crash"
Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""Title, columns, rows."""


@dataclass(frozen=True)
class Request:
    """``name``: "group/index". ``text``: the prompt."""

    name: str
    num_tokens: int
    seed: int
    text: str

    @property
    def excerpt(self) -> str:
        line = " ".join(self.text.split())
        return line if len(line) <= EXCERPT else line[: EXCERPT - 3] + "..."


@dataclass(frozen=True)
class Commands:
    """Lines for a shell. ``reproduce`` is empty where there is nothing to reproduce."""

    reproduce: str = ""
    without_crash: tuple[str, ...] = ()


@dataclass(frozen=True)
class CrashReport:
    """``requests``: all of them, in order. ``first``: the crash that was looked for. ``planted``: crashes in words."""

    found: Found
    attempts: Sequence[Attempt]
    max_attempts: int
    requests: Sequence[Request]
    first: Ending | None
    folder: str
    seconds: float
    core_dump: CoreDump | None = None
    commands: Commands = field(default_factory=Commands)
    planted: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        return CRASH if self.found.is_reproduced else NOT_REPRODUCED

    @property
    def failed_checks(self) -> list[CheckResult]:
        if not self.found.is_reproduced:
            return []
        cause = self.first.cause if self.first else ""
        return [CheckResult("engine crash", Verdict.FAIL, f"{cause}; {self.explanation}")]

    @property
    def explanation(self) -> str:
        """One sentence on the settings."""
        found = self.found
        names = [t.name for t in found.removing if not t.is_narrow]
        if len(names) > 1:
            text = f"it needs {len(names)} things at once: changing any one of {', '.join(names)} removes it"
        elif names:
            text = f"changing {names[0]} removes it"
        elif found.removing_set:
            return f"it is gone only with {' and '.join(t.name for t in found.removing_set)} changed together"
        elif found.stays:
            return "no toggle removes it: it stays with all of them changed together"
        else:
            return "no toggle was found that removes it"
        rest = {True: "; it stays with everything else changed", False: "; with everything else changed it is gone too"}
        return text + (rest[found.is_enough] if found.is_enough is not None else "")

    @property
    def smallest(self) -> list[Request]:
        return [self.requests[i] for i in self.found.requests]

    def rows(self) -> list[tuple[str, str]]:
        """(label, value) for the closing table."""
        return list(self._rows())

    def _rows(self) -> Iterator[tuple[str, str]]:
        found = self.found
        yield "verdict", f"{self.verdict}: {self._confirmed()}"
        if self.first is not None:
            yield "crash", f"{self.first.cause} while {self.first.phase}"
            yield "settings", self.explanation
            yield from self._requests()
        for name, value in found.unknown.items():
            yield "no evidence", f"{name}: {value}"
        for text in self.doubts():
            yield "doubtful", text
        if found.is_flaky:
            yield "flaky", f"what survived was repeated until it had survived {found.num_repeats} times"
        yield "engine starts", f"{len(self.attempts)} of at most {self.max_attempts}, {self.seconds:.0f} s"
        if found.stopped:
            yield "stopped early", f"{found.stopped}: what stands here may not be the smallest"
        yield from self._dump()
        if self.commands.reproduce:
            yield "reproduce", self.commands.reproduce
        for line in self.commands.without_crash:
            yield "without the crash", line
        yield "folder", self.folder

    def doubts(self) -> list[str]:
        """What does not fit a crash that comes every time; a flaky one is known to be none."""
        if self.found.is_flaky or self.first is None:
            return []
        own = [a for a in self.attempts if not a.trial.changed and a.purpose in (REQUESTS, LAST)]
        crashed = [a for a in own if a.ending.is_like(self.first)]
        found = []
        for a in (a for a in own if a.ending.outcome == Outcome.SURVIVED):
            part = next((b for b in crashed if set(b.trial.requests) <= set(a.trial.requests)), None)
            if part is not None:
                text = f"attempt {a.number} survived with all requests of attempt {part.number}, which crashed"
                found.append(f"{text}: it is flaky (confirm with more --runs), or more requests hide it")
        return found[:1]

    def _confirmed(self) -> str:
        found = self.found
        if not found.is_reproduced:
            return f"not reproduced in {found.num_runs} run{'s' if found.num_runs > 1 else ''}"
        return f"crashed in {found.num_crashed} of {found.num_runs}{', flaky' if found.is_flaky else ''}"

    def _requests(self) -> Iterator[tuple[str, str]]:
        found = self.found
        if not found.requests or (self.first is not None and self.first.phase == Phase.STARTING):
            yield "requests", "none: it crashes before any is sent"
            return
        how = "none can be left out" if found.is_minimal else "fewer were not tried"
        yield "requests", f"{len(found.requests)} of {len(self.requests)} show it; {how}"

    def _dump(self) -> Iterator[tuple[str, str]]:
        dump = self.core_dump
        if dump is None:
            return
        if dump.skipped:
            yield "core dump", f"SKIP: {dump.skipped}"
            return
        yield "core dump", ", ".join(dump.files)
        yield "failing kernel", dump.kernel or "cuda-gdb did not name it here; open the dump yourself"
        yield "open it", dump.command

    def toggle_rows(self) -> list[tuple[str, ...]]:
        """(toggle, verdict, why) of every toggle that was looked at."""
        return [(t.name, *self._judged(t)) for t in self.found.toggles if not t.is_narrow or self._tried(t)]

    def _tried(self, toggle: Toggle) -> bool:
        return any(attempt.trial.names == (toggle.name,) for attempt in self.attempts)

    def _judged(self, toggle: Toggle) -> tuple[str, str]:
        found = self.found
        if toggle.skip:
            return "SKIP", toggle.skip
        if toggle.name in found.not_applied:
            return "NOT APPLIED", found.not_applied[toggle.name]
        if toggle.name in found.unknown:
            return "NO EVIDENCE", found.unknown[toggle.name]
        if toggle in found.removing:
            num = sum(attempt.trial.names == (toggle.name,) for attempt in self.attempts)
            return "REMOVES IT", f"{toggle.about}: crashed in 0 of {num}, read back in the worker"
        if not self._tried(toggle):
            return "NOT TRIED", toggle.about
        return ("TOGETHER", f"{toggle.about}; not alone") if toggle in found.removing_set else ("STAYS", toggle.about)

    def attempt_rows(self) -> list[tuple[str, ...]]:
        """Number, purpose, what was changed, requests, outcome, seconds."""
        return [
            (
                str(a.number),
                a.purpose,
                " + ".join(a.trial.names) or "-",
                str(len(a.trial.requests)),
                "NOT APPLIED" if a.not_applied else str(a.ending.outcome),
                a.ending.cause,
                f"{a.ending.seconds:.1f}",
            )
            for a in self.attempts
        ]

    def request_rows(self) -> list[tuple[str, ...]]:
        """The smallest set: name, tokens, seed, text."""
        shown = self.smallest if self.found.is_reproduced else []
        return [(r.name, str(r.num_tokens), str(r.seed), r.excerpt) for r in shown]

    def tables(self) -> list[Table]:
        """Everything but ``rows``, what is empty left out."""
        stack: list[tuple[str, ...]] = [(frame,) for frame in self.stack()]
        attempts = ("#", "for", "changed", "requests", "outcome", "what happened", "seconds")
        found: list[Table] = [
            ("attempts", attempts, self.attempt_rows()),
            ("settings", ("toggle", "verdict", "why, or what it takes away"), self.toggle_rows()),
            ("smallest requests", ("sample", "tokens", "seed", "prompt"), self.request_rows()),
            ("Python stack of the crash, the innermost call first", ("call",), stack),
        ]
        return [part for part in found if part[2]]

    def stack(self) -> tuple[str, ...]:
        """The Python stack of the crash, the innermost call first: of the last attempt, else of the first crash."""
        last = self.found.last
        endings = [last.ending if last else None, self.first]
        return next((e.stack[:NUM_FRAMES] for e in endings if e is not None and e.stack), ())

    def as_dict(self) -> dict[str, Any]:
        """Plain data for ``--json`` and for the run's record."""
        found = self.found
        return {
            "command": COMMAND,
            "verdict": self.verdict,
            "num_runs": found.num_runs,
            "num_crashed": found.num_crashed,
            "crash": None if self.first is None else {"cause": self.first.cause, "phase": str(self.first.phase)},
            "stack": list(self.stack()),
            "explanation": self.explanation if found.is_reproduced else "",
            "removed_by": [t.name for t in found.removing],
            "removed_together": [t.name for t in found.removing_set],
            "stays_with_all_changed": found.stays,
            "stays_with_the_others_changed": found.is_enough,
            "toggles": [self._toggle(t) for t in self.found.toggles if not t.is_narrow or self._tried(t)],
            "requests": [r.name for r in self.smallest] if found.is_reproduced else [],
            "is_minimal": found.is_minimal,
            "num_requests": len(self.requests),
            "num_engine_starts": len(self.attempts),
            "max_attempts": self.max_attempts,
            "doubts": self.doubts(),
            "stopped": found.stopped,
            "seconds": self.seconds,
            "core_dump": None if self.core_dump is None else asdict(self.core_dump),
            "reproduce": self.commands.reproduce,
            "without_crash": list(self.commands.without_crash),
            "planted": list(self.planted),
            "folder": self.folder,
            "attempts": [self._attempt(a) for a in self.attempts],
        }

    def _toggle(self, toggle: Toggle) -> dict[str, Any]:
        verdict, why = self._judged(toggle)
        what = {name: getattr(toggle, name) for name in ("name", "axis", "about", "arguments", "environment", "drops")}
        return {**what, "verdict": verdict, "reason": why, "proved_by": dict(toggle.reads)}

    def _attempt(self, a: Attempt) -> dict[str, Any]:
        return {
            "number": a.number,
            "purpose": a.purpose,
            "changed": list(a.trial.names),
            "requests": [self.requests[i].name for i in a.trial.requests],
            "outcome": str(a.ending.outcome),
            "phase": str(a.ending.phase),
            "cause": a.ending.cause,
            "seconds": a.ending.seconds,
            "not_applied": dict(a.not_applied),
            "read_back": dict(a.ending.facts),
            "folder": a.ending.folder,
        }


def way_out(toggles: Sequence[Toggle], given: Mapping[str, Any], command: str) -> str:
    """A line for a shell that runs ``command`` with this change. ``given``: the run's own [vllm]."""
    before = [f"{name}={shlex.quote(value)}" for t in toggles for name, value in t.environment.items()]
    pairs = [f"{path}={_value(value)}" for t in toggles for path, value in _flat("vllm", t.arguments)]
    line = " ".join([*before, command, *map(shlex.quote, pairs)])
    dropped = [f"vllm.{name}" for t in toggles for name in t.drops if name in given]
    return f"{line}  # and without {', '.join(dropped)}" if dropped else line


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _flat(f"{name}.{key}", entry)
    else:
        yield name, value


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
