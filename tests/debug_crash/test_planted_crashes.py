"""The little language of planted crashes: what it means, and that nothing else is taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.debug.crash.planted import KINDS, NUMBERS, SWITCHES, PlantedCrash, State, Term, parse
from vime.errors import UsageError

OFF = dict.fromkeys(SWITCHES, False)


def state(batch: int = 0, requests: tuple[str, ...] = (), **on: bool) -> State:
    return State({**OFF, **on}, {**OFF, "eager": True}, dict.fromkeys(NUMBERS, 0) | {"batch": batch}, requests)


@pytest.mark.parametrize(
    ("text", "where", "otherwise"),
    [
        ("segfault if prefix_caching and batch > 4", state(5, prefix_caching=True), state(4, prefix_caching=True)),
        ("abort if prefix_caching or chunked_prefill", state(chunked_prefill=True), state()),
        ("hang if not eager", state(), state(eager=True)),
        ("hang if asked.eager and not eager", state(), state(eager=True)),
        ("exception if request 0/1 and request 2/0", state(2, ("0/1", "2/0")), state(1, ("0/1",))),
        ("segfault if eager and (speculative or batch == 1)", state(1, eager=True), state(1, speculative=True)),
        ("segfault if eager or speculative and cuda_graph", state(eager=True), state(speculative=True)),
    ],
)
def test_conditions(text, where, otherwise):
    fault = parse(text)
    assert fault.condition is not None
    assert fault.condition.holds(where)
    assert not fault.condition.holds(otherwise)


def test_without_a_condition_and_with_a_probability():
    assert parse("segfault") == PlantedCrash("segfault")
    assert parse("hang if eager with probability 0.5").probability == 0.5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nan-weight", "'nan-weight' is no kind of crash; known: segfault, abort, hang, exception"),
        ("segfault when eager", "'when' is one word too many"),
        ("segfault if", "it ends in the middle"),
        ("segfault if (eager", "a bracket is not closed"),
        ("segfault if eager eager", "'eager' is one word too many"),
        ("segfault if prefixcaching", "'prefixcaching' is no switch and no number; known: prefix_caching"),
        ("segfault if batch", "batch is followed by one of"),
        ("segfault if batch > eager", "batch: 'eager' is no number"),
        ("segfault if request eager", "request 'eager': must be a number, or GROUP/INDEX"),
        ("segfault with probability 0", "probability 0: must be over 0 and at most 1"),
        ("segfault with probability 2", "probability 2: must be over 0"),
        ("segfault with luck", "'with' is followed by 'probability'"),
        ("segfault if __import__('os').abort()", "is not understood"),
        ("segfault if __import__", "'__import__' is no switch"),
        ("segfault if eager; hang", "'; hang' is not understood"),
        ("", "'' is no kind of crash"),
    ],
)
def test_nothing_else_is_taken(text, says):
    with pytest.raises(UsageError) as refused:
        parse(text)
    assert says in refused.value.message
    assert "for example --inject" in refused.value.hint


def test_requests_are_named_by_what_they_are():
    """So that a smaller record, in which they have other places, has the same crash."""
    names = ["0/0", "0/1", "5/0", "5/1"]
    assert str(parse("segfault if request 3 and request 0/1").named(names)) == (
        "segfault if request 5/1 and request 0/1"
    )
    with pytest.raises(UsageError, match=r"there is no request 4"):
        parse("segfault if request 4").named(names)


TERMS = st.recursive(
    st.sampled_from(SWITCHES).map(lambda name: Term("switch", (name,)))
    | st.sampled_from(SWITCHES).map(lambda name: Term("switch", (f"asked.{name}",)))
    | st.tuples(st.sampled_from(NUMBERS), st.integers(0, 99)).map(lambda pair: Term(">=", (pair[0], float(pair[1]))))
    | st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda pair: Term("request", (f"{pair[0]}/{pair[1]}",))),
    lambda inner: (
        inner.map(lambda part: Term("not", (part,)))
        | st.tuples(st.sampled_from(["and", "or"]), st.lists(inner, min_size=2, max_size=3)).map(
            lambda pair: Term(pair[0], tuple(pair[1]))
        )
    ),
    max_leaves=8,
)


@given(st.sampled_from(KINDS), st.none() | TERMS, st.sampled_from([1.0, 0.25]))
def test_what_is_printed_is_read_back_as_the_same(kind, condition, probability):
    fault = PlantedCrash(kind, condition, probability)
    assert parse(str(fault)) == fault
