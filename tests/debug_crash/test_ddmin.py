"""Delta debugging against the definition: the answer shows the symptom, and no single item can be left out of it."""

from __future__ import annotations

from contextlib import suppress
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from vime.debug.crash.ddmin import Question, ddmin, minimal, split, worst_case

SUBSETS = st.integers(1, 9).flatmap(
    lambda n: st.tuples(st.just(n), st.lists(st.sets(st.integers(0, n - 1)), max_size=4))
)


def is_minimal(found: tuple[int, ...], shows) -> bool:
    return shows(found) and not any(len(found) > 1 and shows(tuple(i for i in found if i != out)) for out in found)


@settings(deadline=None, max_examples=300)
@given(SUBSETS)
def test_of_a_symptom_that_more_items_never_hide(case):
    """Any one of several guilty sets is enough; what is found is one that holds no other."""
    num, guilty = case
    guilty = [frozenset(g) for g in guilty if g] or [frozenset(range(num))]
    question = Question(tuple(range(num)), lambda part: any(g <= set(part) for g in guilty))
    found = minimal(question)
    assert frozenset(found) in {g for g in guilty if not any(other < g for other in guilty)}
    assert question.num_asked <= worst_case(num)


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 8), st.integers(0, 2**32))
def test_of_any_symptom_at_all(num, seed):
    """More items may hide it again: the answer is still one of which no single item can be left out."""

    def shows(part: tuple[int, ...]) -> bool:
        return len(part) == num or (len(part) > 0 and hash((seed, part)) % 3 == 0)

    question = Question(tuple(range(num)), shows)
    assert is_minimal(minimal(question), shows)
    assert question.num_asked <= worst_case(num)
    assert is_minimal(ddmin(Question(tuple(range(num)), shows), tuple(range(num))), shows)


def test_the_guilty_two_of_32_in_no_more_than_19_questions():
    """Every pair. Zeller's ddmin alone takes up to 34."""
    most = 0
    for pair in combinations(range(32), 2):
        question = Question(tuple(range(32)), lambda part, pair=pair: set(pair) <= set(part))
        assert minimal(question) == pair
        most = max(most, question.num_asked)
    assert most == 19


def test_one_of_32_and_all_of_32():
    one = Question(tuple(range(32)), lambda part: 13 in part)
    assert minimal(one) == (13,)
    assert one.num_asked <= 10
    every = Question(tuple(range(32)), lambda part: len(part) == 32)
    assert minimal(every) == tuple(range(32))
    assert every.num_asked <= worst_case(32)


def test_what_was_reached_is_kept_where_the_caller_gives_up():
    asked = []

    def shows(part: tuple[int, ...]) -> bool:
        if len(asked) == 5:
            raise TimeoutError
        asked.append(part)
        return {3, 17} <= set(part)

    question = Question(tuple(range(32)), shows)
    with suppress(TimeoutError):
        minimal(question)
    assert {3, 17} <= set(question.smallest)
    assert len(question.smallest) < 32


def test_parts_are_whole_and_none_is_empty():
    assert split((1, 2, 3, 4, 5), 2) == [(1, 2), (3, 4, 5)]
    assert split((1, 2), 5) == [(1,), (2,)]
