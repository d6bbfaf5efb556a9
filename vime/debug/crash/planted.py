"""A planted crash, in words: "segfault if prefix_caching and batch > 4 with probability 0.5".

    fault      KIND [if CONDITION] [with probability NUMBER]
    KIND       segfault, abort, hang, exception
    CONDITION  and, or, not, brackets; over switches, ``asked.`` switches, numbers compared, and ``request WHICH``

Switches and numbers are read in the engine's worker at each step: as they are in force, or with ``asked.`` as they were
asked for (a CPU captures no graphs, whatever is asked). ``request 3`` is the fourth of all, ``request 0/1`` that of
group 0 and index 1; it holds while this very request, its tokens and its seed, is in the batch. Nothing is evaluated as
Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vime.errors import UsageError

KINDS = ("segfault", "abort", "hang", "exception")
SWITCHES = (
    "prefix_caching",
    "chunked_prefill",
    "eager",
    "cuda_graph",
    "compile",
    "speculative",
    "cascade_attention",
    "async_scheduling",
    "custom_all_reduce",
    "launch_blocking",
)
NUMBERS = ("batch", "tokens", "max_num_seqs", "block_size")
"""batch: requests in the step; tokens: those computed in it."""
COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}
_TOKEN = re.compile(r"\s*(\d+/\d+|\d+\.\d+|\d+|asked\.[a-z_0-9]+|[a-z_][a-z_0-9-]*|>=|<=|==|!=|>|<|\(|\))", re.ASCII)
_EXAMPLE = "for example --inject 'segfault if prefix_caching and batch > 4'"


@dataclass(frozen=True)
class State:
    """What a condition is asked about: one step of the engine. ``requests``: names "group/index" in the batch."""

    in_force: Mapping[str, bool]
    asked: Mapping[str, bool]
    numbers: Mapping[str, float]
    requests: Collection[str] = ()


@dataclass(frozen=True)
class Term:
    """``operator``: and, or, not, request, switch, a comparison. ``parts``: its terms, or its name and its number."""

    operator: str
    parts: tuple[Any, ...]

    def holds(self, state: State) -> bool:
        first, *rest = self.parts
        match self.operator:
            case "and":
                return all(part.holds(state) for part in self.parts)
            case "or":
                return any(part.holds(state) for part in self.parts)
            case "not":
                return not first.holds(state)
            case "request":
                return first in state.requests
            case "switch":
                _, is_asked, name = first.rpartition("asked.")
                return bool((state.asked if is_asked else state.in_force)[name])
        return COMPARE[self.operator](state.numbers[first], rest[0])

    def __str__(self) -> str:
        match self.operator:
            case "and" | "or":
                return f"({f' {self.operator} '.join(map(str, self.parts))})"
            case "not":
                return f"not {self.parts[0]}"
            case "request":
                return f"request {self.parts[0]}"
            case "switch":
                return str(self.parts[0])
        return f"{self.parts[0]} {self.operator} {self.parts[1]:g}"

    def map_requests(self, name_of: Callable[[str], str]) -> Term:
        if self.operator == "request":
            return Term("request", (name_of(self.parts[0]),))
        return Term(self.operator, tuple(p.map_requests(name_of) if isinstance(p, Term) else p for p in self.parts))


@dataclass(frozen=True)
class PlantedCrash:
    """``condition`` None: always. ``probability``: of the whole attempt, drawn once from its seed."""

    kind: str
    condition: Term | None = None
    probability: float = 1.0

    def __str__(self) -> str:
        text = "" if self.condition is None else str(self.condition)
        is_bracketed = self.condition is not None and self.condition.operator in ("and", "or")
        condition = f" if {text[1:-1] if is_bracketed else text}" if text else ""
        return f"{self.kind}{condition}" + (f" with probability {self.probability:g}" if self.probability < 1 else "")

    def named(self, names: Sequence[str]) -> PlantedCrash:
        """With requests by "group/index". ``names``: of all, in order. UsageError for one that is not there."""

        def name_of(which: str) -> str:
            if "/" in which and which in names:
                return which
            if "/" not in which and int(which) < len(names):
                return names[int(which)]
            raise UsageError(f"--inject {self}: there is no request {which}", f"there are {len(names)}: {_span(names)}")

        condition = None if self.condition is None else self.condition.map_requests(name_of)
        return PlantedCrash(self.kind, condition, self.probability)


def parse(text: str) -> PlantedCrash:
    """UsageError, with the place, for what is no planted crash."""
    return _Parser(text).fault()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[str] = []
        at = 0
        while text[at:].strip():
            found = _TOKEN.match(text, at)
            if found is None:
                raise self.error(f"{text[at:].strip()[:20]!r} is not understood")
            self.tokens.append(found[1])
            at = found.end()
        self.at = 0

    def error(self, what: str) -> UsageError:
        return UsageError(f"--inject {self.text!r}: {what}", _EXAMPLE)

    @property
    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.next
        self.at += 1
        return token

    def fault(self) -> PlantedCrash:
        kind = self.take()
        if kind not in KINDS:
            raise self.error(f"{kind!r} is no kind of crash; known: {', '.join(KINDS)}")
        condition = None
        if self.next == "if":
            self.take()
            condition = self.either()
        probability = self.probability() if self.next == "with" else 1.0
        if self.next:
            raise self.error(f"{self.next!r} is one word too many")
        return PlantedCrash(kind, condition, probability)

    def probability(self) -> float:
        self.take()
        if self.take() != "probability":
            raise self.error("'with' is followed by 'probability' and a number")
        value = self.number("probability")
        if not 0 < value <= 1:
            raise self.error(f"probability {value:g}: must be over 0 and at most 1")
        return value

    def either(self) -> Term:
        return self.joined("or", self.both)

    def both(self) -> Term:
        return self.joined("and", self.atom)

    def joined(self, word: str, part: Callable[[], Term]) -> Term:
        parts = [part()]
        while self.next == word:
            self.take()
            parts.append(part())
        return parts[0] if len(parts) == 1 else Term(word, tuple(parts))

    def atom(self) -> Term:
        token = self.take()
        if token == "not":
            return Term("not", (self.atom(),))
        if token == "(":
            inner = self.either()
            if self.take() != ")":
                raise self.error("a bracket is not closed")
            return inner
        if token == "request":
            which = self.take()
            if not re.fullmatch(r"\d+(/\d+)?", which):
                raise self.error(f"request {which!r}: must be a number, or GROUP/INDEX")
            return Term("request", (which,))
        if token in NUMBERS:
            operator = self.take()
            if operator not in COMPARE:
                raise self.error(f"{token} is followed by one of {' '.join(COMPARE)} and a number")
            return Term(operator, (token, self.number(token)))
        if token.removeprefix("asked.") in SWITCHES:
            return Term("switch", (token,))
        known = f"known: {', '.join(SWITCHES)} (also asked.NAME), {', '.join(NUMBERS)}, request"
        raise self.error(f"{token!r} is no switch and no number; {known}" if token else "it ends in the middle")

    def number(self, of: str) -> float:
        token = self.take()
        try:
            return float(token)
        except ValueError:
            raise self.error(f"{of}: {token!r} is no number") from None


def _span(names: Sequence[str]) -> str:
    return f"0 to {len(names) - 1}, or {names[0]} to {names[-1]}" if names else "none"
