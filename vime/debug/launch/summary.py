"""What the end of a debug run says of its points: how often each stopped, or why it never did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from vime.debug.stop.spec import Point, Spec
from vime.debug.stop.tally import Tally


def summary(spec: Spec, seen: Mapping[str, int], tallies: Sequence[Tally] | None) -> Iterator[tuple[str, bool]]:
    """(line, whether it is a warning) for each point, then for other stops.

    ``seen``: stops that were told, by point; ``tallies``: what the processes noted, None where they could not.
    """
    for point in spec.points:
        mine = [one for one in tallies or () if one.point == point.id]
        count = max(seen.get(point.id, 0), sum(one.num_stops for one in mine))
        if count:
            yield f"{_name(point)}: {_stops(count)}", False
        elif tallies is None:
            yield f"{_name(point)}: no stop was seen", True
        else:
            yield f"{_name(point)} {_why_not(point, mine)}", True
    noted = Counter(dict.fromkeys(seen, 0))
    for one in tallies or ():
        noted[one.point] += one.num_stops
    points = {point.id for point in spec.points}
    for reason in [reason for reason in noted if reason not in points]:
        yield f"{reason}: {_stops(max(seen.get(reason, 0), noted[reason]))}", False


def _why_not(point: Point, mine: Sequence[Tally]) -> str:
    if not mine:
        return "was never reached"
    names = ", ".join(dict.fromkeys(one.who for one in mine))
    selected = [one for one in mine if one.is_selected]
    if not selected:
        return f"was reached by {names} alone, for whom --rank or --role does not ask"
    if point.condition and not any(one.is_held for one in selected):
        return f"was reached by {names}, but the condition {point.condition!r} never held"
    if point.hit > 1:
        return f"was reached by {names}, but by none of them {point.hit} times (--hit)"
    return f"was reached by {names}, but no stop was seen"


def _name(point: Point) -> str:
    return f"{point.id} {point.text}"


def _stops(count: int) -> str:
    return f"{count} stop{'s' * (count != 1)}"
