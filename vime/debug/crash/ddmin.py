"""A smallest part of a set that still shows a symptom, in as few questions as can be: each one is an engine's start.

ddmin: A. Zeller, R. Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE TSE 28(2), 2002. It is right
whatever the symptom depends on, but asks 25 questions for 2 guilty of 32. Where more items never hide the symptom, the
halving of QuickXplain (U. Junker, AAAI 2004) finds them in half as many; ddmin then has the last word on its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Generic, TypeVar

T = TypeVar("T")


class Question(Generic[T]):
    """``shows`` of a part of ``items``, asked once per part; ``smallest``: the smallest part so far that shows it."""

    def __init__(self, items: tuple[T, ...], shows: Callable[[tuple[T, ...]], bool]) -> None:
        self.items, self.smallest = items, items
        self.num_asked = 0
        self._shows = shows
        self._known: dict[tuple[T, ...], bool] = {items: True, (): False}

    def __call__(self, part: Sequence[T]) -> bool:
        chosen = set(part)
        key = tuple(item for item in self.items if item in chosen)
        if key not in self._known:
            self.num_asked += 1
            self._known[key] = self._shows(key)
            if self._known[key] and len(key) < len(self.smallest):
                self.smallest = key
        return self._known[key]


def minimal(shows: Question[T]) -> tuple[T, ...]:
    """A part of ``shows.items`` that shows the symptom and of which no single item can be left out.

    The items themselves show it, the empty set is taken not to; neither is asked. ``shows`` is False also where it
    cannot be told; where it raises, ``shows.smallest`` is what was reached.
    """
    quick_explain(shows)
    return ddmin(shows, shows.smallest)


def quick_explain(shows: Question[T]) -> tuple[T, ...]:
    """The guilty items, where more items never hide the symptom: about log2(n) questions for each."""

    def guilty(given: tuple[T, ...], is_grown: bool, items: tuple[T, ...]) -> tuple[T, ...]:
        if is_grown and shows(given):
            return ()
        if len(items) == 1:
            return items
        left, right = items[: len(items) // 2], items[len(items) // 2 :]
        in_right = guilty((*given, *left), True, right)
        return guilty((*given, *in_right), bool(in_right), left) + in_right

    found = guilty((), False, shows.items) if shows.items else ()
    return found if shows(found) else shows.smallest


def ddmin(shows: Question[T], items: tuple[T, ...]) -> tuple[T, ...]:
    """Zeller's ddmin, from ``items``, which show the symptom. At most n^2 + 3n questions."""
    found, num_parts = items, 2
    while len(found) >= 2:
        parts = split(found, num_parts)
        rests = [] if num_parts == 2 else [without(found, part) for part in parts]  # of two, each is the other's rest
        part = next((part for part in parts if shows(part)), None)
        rest = next((rest for rest in rests if shows(rest)), None) if part is None else None
        if part is not None:
            found, num_parts = part, 2
        elif rest is not None:
            found, num_parts = rest, max(num_parts - 1, 2)
        elif num_parts >= len(found):
            break
        else:
            num_parts = min(2 * num_parts, len(found))
    return found


def split(items: tuple[T, ...], num_parts: int) -> list[tuple[T, ...]]:
    """``num_parts`` neighbouring parts that differ in length by one at most; none is empty."""
    edges = [len(items) * i // num_parts for i in range(num_parts + 1)]
    return [items[a:b] for a, b in pairwise(edges) if a < b]


def without(items: tuple[T, ...], part: tuple[T, ...]) -> tuple[T, ...]:
    left_out = set(part)
    return tuple(item for item in items if item not in left_out)


def worst_case(num_items: int) -> int:
    """No more questions than this are asked of so many items, whatever the symptom depends on."""
    return 2 * num_items + num_items**2 + 3 * num_items if num_items >= 2 else 0
