"""``--where`` and ``--sort``: what they find, and that nothing but the listed forms gets through."""

import ast
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vime.errors import EXIT_USAGE, UsageError
from vime.record.fields import Fields
from vime.record.names import FIELDS, STATUSES
from vime.record.where import ARITHMETIC, FUNCTIONS, MAX_CHARS, ORDER, condition, sort_key
from vime.types import RolloutBatch, Sample, Status


def sample(index, log_probs, mask, **changes):
    """Two prompt tokens, then ``log_probs``."""
    return Sample(
        7, index, np.arange(2 + len(mask)), 2, np.array([False, False, *mask]), np.array([0, 0, *log_probs]), **changes
    )


FOUR = Fields(
    RolloutBatch.from_samples(
        5,
        [
            sample(0, [-1.0, -3.0], [1, 1], reward=0.0, status=Status.TRUNCATED, text="Answer: 7", label="7"),
            sample(1, [-0.5, 0.0, -1.5], [1, 0, 1], reward=0.5, text="tool", metadata={"level": 4, "tags": ["a"]}),
            sample(2, [], [], text="", metadata={"level": 5, "hard": True}, weight_version_max=3, seed=9),
            sample(3, [np.nan], [1], reward=1.0, status=Status.ABORTED, prompt_text="<s>2+5="),
        ],
    )
)


def found(text):
    return condition(text).matches(FOUR)


def problem(text):
    with pytest.raises(UsageError) as error:
        condition(text).matches(FOUR)
    assert error.value.exit_code == EXIT_USAGE
    assert "\n" not in error.value.message
    return error.value.message


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("reward < 0.1 and status == 'truncated'", [0]),
        ("reward >= 0.5", [1, 3]),
        ("0 < reward < 1", [1]),
        ("reward is None", [2]),
        ("reward is not None and not reward < 1", [3]),
        ("status in ('truncated', 'aborted')", [0, 3]),
        ("status not in ['completed']", [0, 3]),
        ("'Answer:' in text", [0]),
        ("'answer' in lower(text)", [0]),
        ("'x' in label", []),
        ("label == '7'", [0]),
        ("len(text) == 0", [2, 3]),
        ("response_len == 3 and num_sampled == 2 and prompt_len == 2", [1]),
        ("mean_log_prob == -2.0", [0]),
        ("mean_log_prob == -1.0 and min_log_prob == -1.5", [1]),
        ("mean_log_prob is None", [2]),
        ("mean_log_prob != mean_log_prob", [3]),
        ("abs(mean_log_prob) > 1", [0]),
        ("round(reward + 0.06, 1) == 0.6", [1]),
        ("reward / 0 > 0", []),
        ("-reward == -0.5", [1]),
        ("2 ** index == 8", [3]),
        ("index % 2 == 1 and index // 2 == 0", [1]),
        ("metadata['level'] > 3", [1, 2]),
        ("metadata['hard']", [2]),
        ("metadata['tags'][0] == 'a'", [1]),
        ("metadata['tags'][3] is None and metadata['none']['deep'] is None", [0, 1, 2, 3]),
        ("weight_version == 3 and weight_version_min == 0 and seed == 9", [2]),
        ("'2+5' in prompt", [3]),
        ("group_id == 7 and rollout_id == 5", [0, 1, 2, 3]),
        ("(reward or reward is None) if 0 else 1", None),
        ("True", [0, 1, 2, 3]),
        ("None", []),
    ],
)
def test_what_is_found(text, numbers):
    if numbers is None:
        problem(text)
    else:
        assert found(text) == numbers


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rewrd < 1", "unknown name rewrd; did you mean reward?"),
        ("status == 'trunkated'", "status is one of completed, truncated, aborted, failed; did you mean truncated?"),
        ("status in ('done', 'failed')", "status is one of"),
        ("reward = 1", "= compares nothing, == does"),
        ("reward <", "invalid syntax"),
        ("", "is empty"),
        ("reward", "reward is a number and no condition"),
        ("reward and True", "reward is a number and no condition"),
        ("reward < 'a'", "sample 7/0: reward < 'a': a number cannot be compared with a text"),
        ("3 in text", "a number cannot be looked for in a text"),
        ("text.upper() == 'A'", "a call of text.upper is not allowed"),
        ("text.__class__", "text.__class__ (Attribute) is not allowed"),
        ("lowr(text) == 'a'", "a call of lowr is not allowed; did you mean lower?"),
        ("__import__('os').system('true')", "is not allowed"),
        ("eval('1')", "a call of eval is not allowed"),
        ("(lambda: 1)()", "is not allowed"),
        ("[x for x in text]", "(ListComp) is not allowed"),
        ("(x := 1)", "(NamedExpr) is not allowed"),
        ("f'{text}' == ''", "(JoinedStr) is not allowed"),
        ("text[0:3] == 'abc'", "what stands in [ ] must be a text or a whole number"),
        ("metadata[text] == 1", "what stands in [ ] must be a text or a whole number"),
        ("9 ** 9 ** 9 > 1", "the number is too large"),
        ("2.0 ** 99999 > 1", "the number is too large"),
        ("10 ** 300 * 10 ** 300 > 1", "the number is too large"),
        ("'a' * 99999999 == text", "arithmetic is for numbers"),
        ("'%99999999d' % 1 == text", "arithmetic is for numbers"),
        ("1 << 99999999 > 1", "(LShift) is not allowed"),
        ("~index == 1", "(Invert) is not allowed"),
        ("round(reward, -99999999) > 1", "the number of digits must lie in -20..20"),
        ("round(reward, ndigits=2) > 1", "round takes 1 or 2 arguments"),
        ("len() == 1", "len takes 1 argument"),
        ("len(*text) == 1", "(Starred) is not allowed"),
        ("len(reward) == 1", "len cannot take a number"),
        ("b'a' == text", "(bytes) is not allowed"),
        ("1j == index", "(complex) is not allowed"),
        ("... == text", "is not allowed"),
        ("index is 1", "is goes with None, True and False"),
        ("'\\d' in text", "invalid escape sequence"),
        ("reward[0] == 1", "a number has no entry 0"),
        ("(" * 300 + "reward" + ")" * 300, "nested"),
        ("not " * 100 + "True", "nested too deeply"),
        ("-" * 1500 + "1 == 1", "nested"),
        ("1 == " * 500 + "1", "characters"),
        ("text == '\0'", "null bytes"),
        ("text == '\ud800'", "encode"),
    ],
)
def test_what_is_refused_and_named(text, says):
    assert says in problem(text)


def test_the_names_that_are_known_stand_in_the_hint():
    with pytest.raises(UsageError) as error:
        condition("x")
    assert all(name in error.value.hint for name in [*FIELDS, *FUNCTIONS])


def test_every_field_has_a_value_and_the_statuses_are_the_types():
    assert {name: len(FOUR[name]) for name in FIELDS} == dict.fromkeys(FIELDS, 4)
    assert list(Status) == list(STATUSES)
    assert Fields(RolloutBatch.from_samples(0, []))["mean_log_prob"] == []


def test_sort_keys_have_values():
    assert sort_key("reward").values(FOUR) == [0.0, 0.5, None, 1.0]
    assert sort_key("len(text) - index").values(FOUR) == [9, 3, -2, -3]
    assert condition("metadata['a'] == metadata['b']['c']").metadata_keys == {"a", "b"}


names = st.sampled_from([*FIELDS, "metadata['level']", "metadata['tags']", "metadata['none']"])
constants = st.sampled_from(["0", "1", "-1", "0.5", "1e308", "99999999999", "'a'", "''", "None", "True", "(1, 'a')"])


def compound(inner):
    two = st.tuples(inner, inner)
    operators = [symbol for symbol, _ in [*ARITHMETIC.values(), *ORDER.values()]]
    operators += ["==", "!=", "in", "not in", "and", "or", "is"]
    return st.one_of(
        st.tuples(two, st.sampled_from(operators)).map(lambda t: f"({t[0][0]} {t[1]} {t[0][1]})"),
        inner.map("(not {})".format),
        inner.map("(-{})".format),
        st.tuples(st.sampled_from([*FUNCTIONS]), inner).map(lambda t: f"{t[0]}({t[1]})"),
        two.map(lambda t: f"round({t[0]}, {t[1]})"),
        two.map(lambda t: f"({t[0]} < {t[1]} <= {t[0]})"),
        st.tuples(inner, st.sampled_from(["0", "'a'", "-1"])).map(lambda t: f"{t[0]}[{t[1]}]"),
    )


def check(text):
    """A bool per sample, or one UsageError of one line."""
    refused, matches = None, []
    try:
        matches = condition(text).matches(FOUR)
    except UsageError as error:
        refused = error
    assert matches == sorted({*matches} & {0, 1, 2, 3})
    assert refused is None or (refused.hint and "\n" not in refused.message)


@settings(max_examples=600, deadline=None)
@given(st.recursive(names | constants, compound, max_leaves=12))
def test_a_well_formed_expression_is_a_bool_per_sample_or_a_usage_error(text):
    check(text)


@settings(max_examples=400, deadline=None)
@given(st.text(max_size=40) | st.text("0123456789()[]{}'\"<>=*+-/%., \n\\andornotifrewardtext_", max_size=60))
@example("x" * (MAX_CHARS + 1))
@example("{**metadata}")
@example("await text")
@example("(yield)")
def test_any_text_is_a_bool_per_sample_or_a_usage_error(text):
    check(text)


@settings(max_examples=200, deadline=None)
@given(st.recursive(names | constants, compound, max_leaves=8))
def test_sort_values_are_plain(text):
    try:
        values = sort_key(text).values(FOUR)
    except UsageError:
        return
    assert all(v is None or isinstance(v, str | int | float | bool | list | dict) for v in values)
    assert all(math.isinf(v) or abs(v) < 2**1024 for v in values if isinstance(v, int | float) and v == v)


def test_no_node_runs_code():
    """What the language lets through cannot reach an attribute, a name of Python or a call of its own."""
    from vime.record.where import _NODES

    assert not {ast.Attribute, ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.JoinedStr, ast.Starred} & {*_NODES}
