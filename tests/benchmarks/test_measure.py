from __future__ import annotations

import json

import pytest

from benchmarks.measure import Goal, Result, Row, Spread, compare, interleave
from benchmarks.report import as_plain, cells, from_plain


def test_a_spread_is_the_median_and_the_range() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert Spread.of([1.0, 2.0, 3.0, 10.0]).median == 2.5


def test_a_spread_of_no_values_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        Spread.of([])


def test_a_spread_shows_its_range_only_where_there_is_one() -> None:
    assert Spread.of([0.5, 0.25, 1.0]).text() == "0.5 (0.25-1)"
    assert Spread.of([0.5]).text() == "0.5"


def test_ratios_are_taken_pair_by_pair() -> None:
    # The machine was twice as slow during the second pair: both sides suffer, the ratio does not.
    row = compare("x", "tokens/s", ours=[90.0, 45.0, 99.0], theirs=[100.0, 50.0, 100.0])
    assert row.ratio == Spread.of([0.9, 0.9, 0.99])
    assert row.measured.median == 90.0


def test_sides_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError):
        compare("x", "s", [1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("goal", "ratio", "verdict"),
    [
        (Goal(at_least=0.95), 0.95, "met"),
        (Goal(at_least=0.95), 0.949, "MISSED"),
        (Goal(at_most=0.02), 0.02, "met"),
        (Goal(at_most=0.02), 0.021, "MISSED"),
        (None, 0.5, ""),
    ],
)
def test_a_goal_bounds_the_median(goal: Goal | None, ratio: float, verdict: str) -> None:
    row = compare("x", "s", [ratio, 0.0001, 1000.0], [1.0, 1.0, 1.0], goal)
    assert row.verdict == verdict


def test_sides_take_turns_and_warm_ups_do_not_count() -> None:
    order: list[str] = []

    def side(name: str) -> object:
        return lambda turn: order.append(f"{name}{turn}") or turn

    found = interleave({"a": side("a"), "b": side("b")}, repetitions=2, warmups=1)
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert found == {"a": [1, 2], "b": [1, 2]}


def test_a_result_survives_json() -> None:
    result = Result("rollout", [compare("x", "tokens/s", [1.0], [2.0], Goal(at_least=0.95))], ["a note"])
    result.rows.append(Row("alone", "s", Spread.of([1.0, 2.0])))
    assert from_plain(json.loads(json.dumps(as_plain(result)))) == result


def test_the_cells_of_a_row() -> None:
    row = compare("x", "s", [1.0], [2.0], Goal(at_most=0.5))
    assert cells(row) == ("x", "s", "1", "2", "0.5", "<= 0.5", "met")
    assert cells(Row("alone", "s", Spread.of([1.0]))) == ("alone", "s", "1", "", "", "", "")
