"""Bytes of every process in every phase of several rounds: what grows, and which rank holds more than its like.

A resident set is no ledger: allocators keep what was freed, and give it back when they like. So growth is the median of
the slopes between all pairs of rounds (Theil 1950, Sen 1968), which one jump, or two, does not move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median

Memory = Mapping[str, Mapping[str, int]]
"""Process -> kind of memory -> bytes."""


def slope(values: Sequence[float]) -> float:
    """Median over all pairs of (later - earlier) / rounds between them; 0.0 for fewer than two values."""
    found = [(b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(values), 2)]
    return float(median(found)) if found else 0.0


@dataclass
class Ledger:
    """``rounds``: of each, phase -> process -> kind -> bytes, in the order of the phases."""

    rounds: list[Mapping[str, Memory]] = field(default_factory=list)

    def column(self, phase: str, process: str, kind: str) -> list[int]:
        """Of every round that has it."""
        return [r[phase][process][kind] for r in self.rounds if kind in r.get(phase, {}).get(process, {})]

    def processes(self) -> list[str]:
        return list(dict.fromkeys(p for r in self.rounds for memory in r.values() for p in memory))

    def kinds(self) -> list[str]:
        return list(dict.fromkeys(k for r in self.rounds for memory in r.values() for m in memory.values() for k in m))

    def phases(self) -> list[str]:
        return list(dict.fromkeys(phase for r in self.rounds for phase in r))

    def growth(self, process: str, kind: str) -> float:
        """Bytes per round: the least over the phases, for what is kept for good is kept in every phase."""
        found = [slope(values) for phase in self.phases() if len(values := self.column(phase, process, kind)) > 2]
        return min(found, default=0.0)

    def growing(self) -> dict[tuple[str, str], float]:
        """(process, kind) -> growth. Not of ``rss`` where ``private`` is known: the kernel drops mapped files when it
        likes, and they come back: ranks of 3.7 GB were seen to lose and regain 500 MB.
        """
        pairs = [(p, k) for p in self.processes() for k in self._kinds_of(p)]
        return {(p, k): self.growth(p, k) for p, k in pairs if k != "rss" or "private" not in self._kinds_of(p)}

    def _kinds_of(self, process: str) -> list[str]:
        return [k for k in self.kinds() if any(self.column(phase, process, k) for phase in self.phases())]

    def largest(self, process: str, kind: str) -> int:
        return max((v for phase in self.phases() for v in self.column(phase, process, kind)), default=0)

    def steps(self, kind: str) -> tuple[list[str], dict[str, list[float | None]]]:
        """(names of all phases of all rounds, by process the bytes there), for a plot."""
        places = [(number, phase) for number, r in enumerate(self.rounds) for phase in r]
        names = [f"round {number} {phase}" for number, phase in places]
        held = {
            process: [self.rounds[n][phase].get(process, {}).get(kind) for n, phase in places]
            for process in self.processes()
        }
        return names, {p: [None if v is None else float(v) for v in values] for p, values in held.items()}

    def as_dict(self) -> list[dict[str, object]]:
        """Plain data: one row per round, phase, process and kind."""
        return [
            {"round": number, "phase": phase, "process": process, "kind": kind, "bytes": held}
            for number, r in enumerate(self.rounds)
            for phase, memory in r.items()
            for process, kinds in memory.items()
            for kind, held in kinds.items()
        ]
