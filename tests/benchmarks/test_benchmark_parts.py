from __future__ import annotations

import numpy as np
import pytest

from benchmarks import debug, start
from benchmarks.cases import TINY
from benchmarks.command import Trained
from benchmarks.overhead import GOAL, share
from benchmarks.process import Side
from benchmarks.rollout import requests
from benchmarks.trainer import MAX_RESPONSE_LEN, PROMPT_LEN, make_data
from vime.errors import VimeError
from vime.types import RolloutBatch, Sample

LINES = [
    (2.0, "12:00:00 driver INFO vime.cluster.session: private Ray cluster at 127.0.0.1:1, token authentication"),
    (5.0, "trainer: qwen3, 0.6 M parameters"),
    (7.0, "engines: 1 x vLLM"),
    (7.5, "weights v0: 47 tensors"),
    (9.0, "weights v1: 47 tensors"),
]


def trained(lines: list[tuple[float, str]]) -> Trained:
    return Trained(lines, [{"rollout_id": 0, "perf/sync_time": 0.25}], 10.0)


def test_the_parts_of_a_start_add_up_to_the_first_step() -> None:
    found = start.parts(trained(LINES))
    assert list(found.values()) == [2.0, 3.0, 2.0, 0.5, 1.25]
    assert sum(found.values()) == 9.0 - 0.25


def test_a_line_that_never_came_is_named() -> None:
    with pytest.raises(VimeError, match="'engines:'"):
        start.parts(trained([line for line in LINES if "engines" not in line[1]]))


def test_the_share_of_a_step_is_taken_rollout_by_rollout() -> None:
    rows = [{"perf/other_time": 0.1, "perf/step_time": 10.0}, {"perf/other_time": 0.3, "perf/step_time": 10.0}]
    row = share(TINY, rows, "other_time", GOAL)
    assert row.ratio is not None
    assert (row.ratio.low, row.ratio.median, row.ratio.high) == pytest.approx((0.01, 0.02, 0.03))
    assert row.verdict == "met"
    assert share(TINY, [rows[1]], "other_time", GOAL).verdict == "MISSED"


def test_the_data_of_the_trainer_benchmark() -> None:
    data = make_data(8, vocab_size=100)
    assert len(data.token_ids_T) == data.offsets[-1] == data.lengths_N.sum()
    assert data.lengths_N.min() >= PROMPT_LEN + 8
    assert data.lengths_N.max() <= PROMPT_LEN + MAX_RESPONSE_LEN
    assert data.normalizer == np.count_nonzero(data.loss_weight_T) == data.lengths_N.sum() - 8 * PROMPT_LEN
    assert not data.advantages_T[data.loss_weight_T == 0].any()
    assert (make_data(8, vocab_size=100).token_ids_T == data.token_ids_T).all()


def test_the_requests_are_prompts_and_seeds_of_the_samples() -> None:
    mask = np.array([False, False, True])
    samples = [Sample(0, i, np.array([7, 8, 9 + i]), 2, mask, np.zeros(3), seed=40 + i) for i in range(2)]
    assert requests(RolloutBatch.from_samples(0, samples)) == [([7, 8], 40), ([7, 8], 41)]


class Echo:
    """A side that answers, or raises."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def times(self, value: int) -> int:
        return self.factor * value

    def fail(self) -> None:
        raise RuntimeError("on purpose")


def test_a_side_lives_in_a_process_of_its_own() -> None:
    with Side("test_benchmark_parts:Echo", 3, env={"OMP_NUM_THREADS": "1"}) as side:
        assert side.call("times", 4) == 12
        with pytest.raises(VimeError, match="on purpose"):
            side.call("fail")
        assert side.call("times", 5) == 15
    assert not side._process.is_alive()


def test_the_points_of_the_debug_benchmark_are_where_they_are_said_to_be() -> None:
    lines = debug.PROGRAM.splitlines()
    assert lines[debug.ENTRY_LINE - 1].strip() == "twice = 2 * i"
    assert lines[debug.UNTAKEN_LINE - 1].strip() == "twice = -twice"
