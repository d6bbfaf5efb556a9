"""What a search found, for people and as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vime.debug.crash.commands import Commands
from vime.debug.crash.core_dump import CoreDump
from vime.debug.crash.found import Found, count
from vime.debug.crash.ledger import Attempt
from vime.debug.crash.search import LAST, REQUESTS
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
class CrashReport:
    """``requests``: all of them, in order. ``sought``: the crash that was looked for, in every run that confirmed it.
    ``planted``: crashes in words.
    """

    found: Found
    attempts: Sequence[Attempt]
    max_attempts: int
    requests: Sequence[Request]
    sought: Sequence[Ending]
    folder: str
    seconds: float
    core_dump: CoreDump | None = None
    commands: Commands = field(default_factory=Commands)
    planted: tuple[str, ...] = ()

    @property
    def first(self) -> Ending | None:
        return self.sought[0] if self.sought else None

    @property
    def verdict(self) -> str:
        return CRASH if self.found.is_reproduced else NOT_REPRODUCED

    @property
    def failed_checks(self) -> list[CheckResult]:
        if not self.found.is_reproduced or self.found.is_interrupted:
            return []
        return [CheckResult("engine crash", Verdict.FAIL, f"{self._causes()}; {self.explanation}")]

    def _causes(self) -> str:
        """Of the crash, one for each signature."""
        causes: dict[str, str] = {}
        for ending in self.sought:
            causes.setdefault(ending.signature, ending.cause)
        return ", or ".join(causes.values())

    @property
    def explanation(self) -> str:
        """One sentence on the settings, and no more than the attempts say."""
        found = self.found
        names = self._needed()
        if len(names) > 1:
            text = f"it needs {len(names)} things at once: changing any one of {', '.join(names)} removes it"
        elif names:
            text = f"changing {names[0]} removes it"
        elif found.removing_set:
            together = f"with {' and '.join(t.name for t in found.removing_set)} changed together"
            only, fewer = ("only ", "") if found.is_set_minimal else ("", "; whether fewer are enough is not known")
            return f"it is gone {only}{together}{fewer}"
        elif found.stays:
            is_read = any(a.trial.changed and a.ending.facts for a in self.attempts)
            unread = "" if is_read else "; whether they were in force is not known: the engine did not come up"
            return f"no toggle removes it: it stays with all of them changed together{unread}"
        else:
            return f"no toggle was found that removes it: {self._changed_so_far()}"
        rest = {True: "; it stays with everything else changed", False: "; with everything else changed it is gone too"}
        return text + (rest[found.is_enough] if found.is_enough is not None else "")

    def _changed_so_far(self) -> str:
        broad = [t for t in self.found.toggles if not (t.skip or t.is_narrow)]
        if not broad:
            return "none can be changed here"
        if not any(a.trial.changed for a in self.attempts):
            return "none was changed"
        num = sum(t in self.found.staying for t in broad)
        return f"it stays with {num} of {len(broad)}, of the others nothing is known"

    def _needed(self) -> list[str]:
        """Toggles that remove it, without those that have another of them in force as well, as the worker reads."""
        broad = [t for t in self.found.removing if not t.is_narrow]
        facts = {a.trial.names: a.ending.facts for a in self.attempts}
        needed: list[Toggle] = []
        for i, t in enumerate(broad):
            within = [u for u in broad if u != t and not u.unread(facts[t.name,])]
            if not any(t.unread(facts[u.name,]) or broad.index(u) < i for u in within):
                needed.append(t)
        return [t.name for t in needed]

    @property
    def smallest(self) -> list[Request]:
        return [self.requests[i] for i in self.found.requests]

    def rows(self) -> list[tuple[str, str]]:
        """(label, value) for the closing table."""
        return list(self._rows())

    def _rows(self) -> Iterator[tuple[str, str]]:
        found = self.found
        yield "verdict", f"{self.verdict}: {self.found.confirmed}"
        if self.first is not None:
            yield "crash", f"{self._causes()} while {self.first.phase}"
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
            yield "stopped early", f"{found.stopped}: what was not tried by then is not known"
        yield from self._dump()
        if self.commands.reproduce:
            yield "reproduce", self.commands.reproduce
        for line in self.commands.without_crash:
            yield "without the crash", line
        yield "folder", self.folder

    def doubts(self) -> list[str]:
        """Runs as it is that ended otherwise; and what does not fit a crash that comes every time."""
        found = [f"one of the runs that confirm it ended otherwise: {text}" for text in self.found.otherwise]
        return found if self.found.is_flaky else [*found, *self._contradictions()]

    def _contradictions(self) -> list[str]:
        own = [a for a in self.attempts if not a.trial.changed and a.purpose in (REQUESTS, LAST)]
        crashed = [a for a in own if any(a.ending.is_like(seen) for seen in self.sought)]
        found = []
        for a in (a for a in own if a.ending.outcome == Outcome.SURVIVED):
            part = next((b for b in crashed if set(b.trial.requests) <= set(a.trial.requests)), None)
            if part is not None:
                text = f"attempt {a.number} survived with all requests of attempt {part.number}, which crashed"
                found.append(f"{text}: it is flaky (confirm with more --runs), or more requests hide it")
        return found[:1]

    def _requests(self) -> Iterator[tuple[str, str]]:
        found = self.found
        if not found.requests or (self.first is not None and self.first.phase == Phase.STARTING):
            yield "requests", "none: it crashes before any is sent"
            return
        how = "one is enough"
        if len(found.requests) > 1:
            how = f"none can be left out: without any one of them {count(found.num_repeats, 'run')} survived"
        if found.open_requests and len(found.open_requests) < len(found.requests):
            names = ", ".join(self.requests[i].name for i in found.open_requests)
            how = f"whether {names} can be left out is not known"
        elif found.open_requests:
            how = "whether fewer are enough is not known"
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
        own = [a for a in self.attempts if a.trial.names == (toggle.name,)]
        if toggle in found.removing:
            return "REMOVES IT", f"{toggle.about}: crashed in 0 of {len(own)}, read back in the worker"
        if toggle in found.staying:
            unread = "" if any(a.ending.facts for a in own) else "; not read back: the engine did not come up"
            if toggle in found.removing_set:
                return "TOGETHER", f"{toggle.about}; not alone{unread}"
            return "STAYS", toggle.about + unread
        text = f"survived {len(own)} times, which is not enough" if own else ""
        return "NOT DECIDED" if own else "NOT TRIED", "; ".join(filter(None, (toggle.about, text)))

    def attempt_rows(self) -> list[tuple[str, ...]]:
        """Number, purpose, what was changed, requests, outcome, seconds."""
        return [
            (
                str(a.number),
                a.purpose,
                " + ".join(a.trial.names) or "-",
                str(len(a.trial.requests)),
                "NOT APPLIED" if a.not_applied else str(a.ending.outcome),
                a.ending.short,
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
            ("requests of the smallest case", ("sample", "tokens", "seed", "prompt"), self.request_rows()),
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
            "crash": None if self.first is None else {"cause": self._causes(), "phase": str(self.first.phase)},
            "stack": list(self.stack()),
            "explanation": self.explanation if found.is_reproduced else "",
            "removed_by": [t.name for t in found.removing],
            "removed_together": [t.name for t in found.removing_set],
            "is_removed_only_together": bool(found.removing_set) and found.is_set_minimal,
            "stays_with_all_changed": found.stays,
            "stays_with_the_others_changed": found.is_enough,
            "toggles": [self._toggle(t) for t in self.found.toggles if not t.is_narrow or self._tried(t)],
            "requests": [r.name for r in self.smallest] if found.is_reproduced else [],
            "is_minimal": found.is_minimal,
            "not_known_of": [self.requests[i].name for i in found.open_requests],
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
