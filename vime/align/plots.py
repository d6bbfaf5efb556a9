"""Plots of a check as plain data, drawn by the HTML report: ``numbers={"plots": [scatter(...).as_dict(), ...]}``.

What is not finite is left out of the drawing as a gap, and counted. Long series are cut down to their largest points,
and say so: a report stays small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np

MAX_POINTS = 10_000


class Kind(StrEnum):
    SCATTER = "scatter"
    LINE = "line"
    BARS = "bars"
    STEPS = "steps"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour. x: numbers, or names for bars and steps; y: None for what is not finite; texts: said of
    each point when it is pointed at, or empty.

    histogram: x are the edges of the bins, one more than y, the counts.
    """

    name: str
    x: tuple[float | str, ...]
    y: tuple[float | None, ...]
    texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.x) - len(self.y) in (0, 1), (len(self.x), len(self.y))
        assert not self.texts or len(self.texts) == len(self.y)


@dataclass(frozen=True, slots=True)
class Plot:
    """``x`` and ``y``: what the axes measure, with the unit. limit: a line across, in units of y (histogram: of x);
    is_log: y on a logarithmic axis, with zeros on its floor; note: what a reader has to know, such as what is left out.
    """

    kind: Kind
    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    limit: float | None = None
    limit_text: str = ""
    is_log: bool = False
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for ``CheckResult.numbers["plots"]``."""
        return {**asdict(self), "kind": str(self.kind)}


def scatter(
    title: str, values: Mapping[str, Any], x: str, y: str, *, at: Mapping[str, Any] | None = None,
    texts: Mapping[str, Sequence[str]] | None = None, limit: float | None = None, limit_text: str = "",
    is_log: bool = True,
) -> Plot:  # fmt: skip
    """One point per value, series by name: differences of tokens. ``at``: where they stand along x; else 0, 1, ...

    ``texts``: by the name of the series, what each point is, such as its token.
    """
    series, notes = [], []
    for name, given in values.items():
        one = _series(name, given, (at or {}).get(name), (texts or {}).get(name, ()))
        largest = _largest(one, MAX_POINTS // max(1, len(values)))
        if len(largest.y) < len(one.y):
            notes.append(f"{name}: the {len(largest.y)} largest of {len(one.y)} are drawn")
        series.append(largest)
    return Plot(Kind.SCATTER, title, x, y, tuple(series), limit, limit_text, is_log, _note(series, notes))


def line(
    title: str, values: Mapping[str, Any], x: str, y: str, *, at: Sequence[float | str] | None = None,
    limit: float | None = None, limit_text: str = "", is_log: bool = True,
) -> Plot:  # fmt: skip
    """A curve per series, such as the error by layer. ``at``: numbers or names along x, the same for every series."""
    series = [_series(name, given, at) for name, given in values.items()]
    return Plot(Kind.LINE, title, x, y, tuple(series), limit, limit_text, is_log, _note(series))


def bars(
    title: str, values: Mapping[str, float | None], x: str, y: str, *, limit: float | None = None,
    limit_text: str = "", is_log: bool = False, name: str = "",
) -> Plot:  # fmt: skip
    """One bar per name, in the order given."""
    series = [_series(name, list(values.values()), list(values))]
    return Plot(Kind.BARS, title, x, y, tuple(series), limit, limit_text, is_log, _note(series))


def steps(
    title: str, values: Mapping[str, Sequence[float | None]], at: Sequence[str], x: str, y: str, *,
    limit: float | None = None, limit_text: str = "",
) -> Plot:  # fmt: skip
    """A ledger: what each series holds in each phase of ``at`` ("round 0 train", ...), as steps from phase to phase."""
    series = [_series(name, given, at) for name, given in values.items()]
    return Plot(Kind.STEPS, title, x, y, tuple(series), limit, limit_text, False, _note(series))


def histogram(
    title: str, values: Mapping[str, Any], x: str, *, num_bins: int = 40, limit: float | None = None,
    limit_text: str = "", y: str = "tokens",
) -> Plot:  # fmt: skip
    """Counts in bins that all series share."""
    given = {name: np.asarray(v, dtype=np.float64).ravel() for name, v in values.items()}
    finite = {name: v[np.isfinite(v)] for name, v in given.items()}
    every = np.concatenate([*finite.values(), np.empty(0)])
    edges = np.histogram_bin_edges(every, num_bins) if every.size else np.array([0.0, 1.0])
    series = [
        Series(name, tuple(edges.tolist()), tuple(np.histogram(v, edges)[0].tolist())) for name, v in finite.items()
    ]
    notes = [f"{name}: {n} not finite" for name, v in given.items() if (n := v.size - finite[name].size)]
    return Plot(Kind.HISTOGRAM, title, x, y, tuple(series), limit, limit_text, False, "; ".join(notes))


def _series(name: str, values: Any, at: Any = None, texts: Sequence[str] = ()) -> Series:
    numbers = np.asarray([np.nan if v is None else v for v in values], dtype=np.float64)
    places = list(range(len(numbers))) if at is None else np.asarray(at).tolist()
    y = tuple(v if ok else None for v, ok in zip(numbers.tolist(), np.isfinite(numbers).tolist(), strict=True))
    return Series(name, tuple(places), y, tuple(texts))


def _largest(series: Series, num: int) -> Series:
    """The ``num`` points farthest from zero, in their order; all that are not finite stay, being the worst."""
    if len(series.y) <= num:
        return series
    size = np.abs(np.array([np.inf if v is None else v for v in series.y]))
    kept = np.sort(np.argsort(-size, kind="stable")[:num]).tolist()
    texts = tuple(series.texts[i] for i in kept) if series.texts else ()
    return Series(series.name, tuple(series.x[i] for i in kept), tuple(series.y[i] for i in kept), texts)


def _note(series: Sequence[Series], notes: Sequence[str] = ()) -> str:
    missing = [f"{s.name or 'values'}: {n} not finite" for s in series if (n := sum(v is None for v in s.y))]
    return "; ".join((*notes, *missing))
