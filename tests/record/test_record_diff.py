"""Planted differences are found where they are, and nothing is found where there is none."""

from dataclasses import replace

import numpy as np
import pytest

from vime.record.diff import diff
from vime.types import RolloutBatch, RolloutHeader, Sample, Status

HEADER = RolloutHeader(model={"path": "m"}, sampling={"temperature": 1.0}, counts={"status_completed": 2})


def sample(group_id=0, index=0, response=(7, 8, 9, 10), prompt=(1, 2), **changes):
    n = len(prompt) + len(response)
    mask = np.arange(n) >= len(prompt)
    fields = {"reward": 0.5, "text": "a", "metadata": {"x": float("nan")}, **changes}
    log_probs = fields.pop("log_probs", -0.25 * mask)
    return Sample(group_id, index, np.array([*prompt, *response]), len(prompt), mask, np.array(log_probs), **fields)


def record(*samples, **header):
    return RolloutBatch.from_samples(0, samples, replace(HEADER, **header))


def only(a, b):
    """The one sample that differs."""
    found = diff(record(a, sample(1)), record(b, sample(1)))
    assert not found.is_equal
    (one,) = found.samples
    assert one.name == "0/0"
    return one


def test_equal_records_are_equal():
    a = record(sample(), sample(0, 1), sample(3, response=()), sample(4, status=Status.FAILED, reward=None))
    found = diff(a, record(*a.samples()))
    assert found.is_equal
    assert found.mean_token_match == 1.0
    assert found.summary() == "rollout 0: equal, 4 samples"


def test_a_token_that_departs_is_located():
    b = sample(response=(7, 8, 99, 10, 11), log_probs=[0, 0, -0.25, -0.75, -1, -1, -1])
    one = only(sample(), b)
    assert (one.position, one.response_position, one.is_in_prompt) == (4, 2, False)
    assert one.token_ids == (9, 99)
    assert one.token_match == 2 / 5
    assert (one.log_prob_max, one.log_prob_mean) == (0.5, 0.25)


def test_an_answer_that_goes_on_departs_where_the_other_ends():
    one = only(sample(response=(7,)), sample(response=(7, 8)))
    assert (one.position, one.token_ids, one.token_match) == (3, (None, 8), 0.5)


def test_another_prompt_matches_nothing():
    one = only(sample(), sample(prompt=(1, 5)))
    assert (one.position, one.response_position, one.is_in_prompt, one.token_match) == (1, None, True, 0.0)
    one = only(sample(response=(7, 8)), sample(prompt=(1, 2, 7), response=(8,)))
    assert (one.position, one.is_in_prompt, one.token_match) == (None, True, 0.0)
    assert "prompt_len" in one.other


def test_log_probs_alone():
    one = only(sample(), sample(log_probs=[0, 0, -0.25, -0.25, -0.25, -0.125]))
    assert (one.position, one.log_prob_max, one.log_prob_mean) == (None, 0.125, 0.03125)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"text": "b"}, "text"),
        ({"label": "7"}, "label"),
        ({"seed": 1}, "seed"),
        ({"prompt_text": "b"}, "prompt_text"),
        ({"weight_version_max": 1}, "weight_version_max"),
        ({"metadata": {"x": 1}}, "metadata"),
    ],
)
def test_other_columns(changes, name):
    assert only(sample(), sample(**changes)).other == (name,)


def test_reward_and_status():
    assert only(sample(), sample(reward=None)).rewards == (0.5, None)
    assert only(sample(), sample(status=Status.TRUNCATED)).statuses == ("completed", "truncated")


def test_header_fields_by_their_dotted_names():
    found = diff(record(), record(sampling={"temperature": 0.5, "top_p": 0.9}, weight_version=3))
    assert found.header == [
        ("weight_version", 0, 3),
        ("sampling.temperature", 1.0, 0.5),
        ("sampling.top_p", None, 0.9),
    ]
    assert not found.is_equal


def test_samples_and_prompts_on_one_side():
    found = diff(record(sample(0), sample(1), sample(1, 1)), record(sample(0), sample(1), sample(2)))
    assert (found.only_a, found.only_b) == (["1/1"], ["2/0"])
    assert (found.prompts_only_a, found.prompts_only_b) == ([], [2])
    assert found.num_common == 2
    assert "1 samples only in A; 1 samples only in B" in found.summary()


def test_another_order():
    found = diff(record(sample(0), sample(1)), record(sample(1), sample(0)))
    assert found.samples == []
    assert found.is_reordered
    assert not found.is_equal


def test_a_name_that_occurs_twice_is_paired_in_order():
    a = record(sample(response=(7,)), sample(response=(8,)))
    assert diff(a, record(*a.samples())).is_equal
    assert diff(a, record(sample(response=(7,)))).only_a == ["0/0"]


def test_the_summary_of_all_that_differs():
    found = diff(record(sample(), sample(1)), record(sample(response=(7, 9), reward=1.0), sample(1)))
    assert found.summary() == ("rollout 0: 1 of 2 samples differ; token match 0.6250; 1 depart, first 0/0; 1 rewards")


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_log_prob_that_is_no_number_is_infinitely_far_from_one_that_is(bad):
    failed = sample(log_probs=[0, 0, bad, -1.0, -1.0, -1.0], status=Status.FAILED)
    one = only(failed, sample(log_probs=[0, 0, -0.5, -1.0, -1.0, -1.0], status=Status.FAILED))
    assert (one.log_prob_max, one.log_prob_mean) == (np.inf, np.inf)
    found = diff(record(sample(1), failed), record(sample(1, log_probs=[0, 0, -1.0, -1.0, -1.0, -1.0]), sample()))
    assert "log-probs by up to inf nats" in found.summary()
    assert diff(record(failed), record(failed)).is_equal
