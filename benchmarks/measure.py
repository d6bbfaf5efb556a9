"""Repetitions, ratios and their spread; what a benchmark hands back. No torch, no clock of its own."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, smallest and largest of ``count`` values."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError for no values."""
        if not values:
            raise ValueError("a spread of no values")
        return cls(statistics.median(values), min(values), max(values), len(values))

    def text(self, form: str = "{:.3g}") -> str:
        """ "0.97 (0.95-0.99)"; a single value stands alone."""
        middle = form.format(self.median)
        return middle if self.count == 1 else f"{middle} ({form.format(self.low)}-{form.format(self.high)})"


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on the median of a ratio."""

    at_least: float | None = None
    at_most: float | None = None

    def is_met(self, ratio: Spread) -> bool:
        low = self.at_least is None or ratio.median >= self.at_least
        return low and (self.at_most is None or ratio.median <= self.at_most)

    def __str__(self) -> str:
        parts = [f">= {self.at_least:g}"] if self.at_least is not None else []
        return " ".join(parts + ([f"<= {self.at_most:g}"] if self.at_most is not None else []))


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a measured quantity, what it stands against, and their ratio where there is one."""

    what: str
    unit: str
    measured: Spread
    against: Spread | None = None
    ratio: Spread | None = None
    goal: Goal | None = None

    @property
    def verdict(self) -> str:
        if self.goal is None or self.ratio is None:
            return ""
        return "met" if self.goal.is_met(self.ratio) else "MISSED"


@dataclass(slots=True)
class Result:
    """What one benchmark found; ``notes`` say what was included and what was found equal on both sides."""

    name: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare(what: str, unit: str, ours: Sequence[float], theirs: Sequence[float], goal: Goal | None = None) -> Row:
    """A row of rates (or sizes) measured in turn: the ratio is taken pair by pair, since a pair shares its moment."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Row(what, unit, Spread.of(ours), Spread.of(theirs), Spread.of(ratios), goal)


def interleave(sides: Mapping[str, Callable[[int], Any]], repetitions: int, warmups: int = 1) -> dict[str, list[Any]]:
    """Call the sides in turn, A B A B ...; each gets the number of the turn. Results of the warm-ups are dropped."""
    results: dict[str, list[Any]] = {name: [] for name in sides}
    for turn in range(warmups + repetitions):
        for name, call in sides.items():
            results[name].append(call(turn))
    return {name: values[warmups:] for name, values in results.items()}
