"""The rewards vime brings along, on answers whose score is plain to see."""

import numpy as np
import pytest

from vime.config.schema import Reward
from vime.errors import UsageError
from vime.reward.exact import is_equal
from vime.reward.math import final_part
from vime.reward.registry import REWARDS, make, needs_label
from vime.types import Sample


def score(text, label, **config):
    sample = Sample(0, 0, np.array([1]), 1, np.zeros(1, bool), np.zeros(1), text=text, label=label)
    return make(Reward(**config))(sample)


@pytest.mark.parametrize(
    ("answer", "label", "expected"),
    [
        ("4", "4", True),
        ("  4\n", "4", True),
        ("5", "4", False),
        ("1,234", "1234", True),
        ("1,234.50", "1234.5", True),
        ("+7", "7", True),
        ("1,23", "123", False),  # no number with thousands commas
        ("-0", "0", True),
        ("Paris", "Paris", True),
        ("paris", "Paris", False),
        ("", "0", False),
        ("4 apples", "4", False),
        ("1e2", "100", False),
    ],
)
def test_exact(answer, label, expected):
    assert is_equal(answer, label) is expected
    assert score(answer, label, name="exact") == float(expected)


def test_exact_with_pattern_compares_the_first_group_of_the_first_match():
    config = {"name": "exact", "pattern": r"#### (.*)"}
    assert score("so\n#### 1,234\n#### 5", "1234", **config) == 1.0
    assert score("1234", "1234", **config) == 0.0
    assert score("x 7 y", "7", name="exact", pattern=r"\d") == 1.0


def test_format_needs_a_full_match():
    config = {"name": "format", "pattern": r"<a>.*</a>"}
    assert score("<a>x</a>", None, **config) == 1.0
    assert score("<a>x</a> ", None, **config) == 0.0
    assert score("<a>\n</a>", None, **config) == 0.0
    assert score("<a>\n</a>", None, name="format", pattern=r"(?s)<a>.*</a>") == 1.0


@pytest.mark.parametrize(
    ("text", "label", "expected"),
    [
        (r"So the answer is \boxed{\frac12}.", "0.5", 1.0),
        ("The answer is 34.", "34", 1.0),
        (r"\boxed{1234}", "1,234", 1.0),
        (r"\boxed{(1,2)}", "(1,2)", 1.0),
        (r"$x = 3$", "x=3", 1.0),
        ("35", "34", 0.0),
        ("", "34", 0.0),
        ("<think>7</think> 5", "7", 0.0),
        ("<think>5</think> 7", "7", 1.0),
        ("<think>it is 7", "7", 0.0),
        ("7", r"\boxed{7}", 1.0),
    ],
)
def test_math(text, label, expected):
    assert score(text, label, name="math") == expected


def test_thinking_is_no_answer():
    assert final_part("<think>a</think>b") == "b"
    assert final_part("a</think>b</think>c") == "c"
    assert final_part("plain") == "plain"
    assert final_part("<think>a") == ""


def test_names_are_exact_and_the_choices_are_listed():
    assert sorted(REWARDS) == sorted(Reward.model_fields["name"].annotation.__args__)
    with pytest.raises(UsageError, match="must be one of exact, math, format, user"):
        make(Reward.model_construct(name="maths"))
    assert [needs_label(Reward.model_construct(name=n)) for n in REWARDS] == [True, True, False, False]
