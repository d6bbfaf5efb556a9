"""Answers whose log-probs are not finite: kept and unscored where nothing is trained, never trained on, recorded."""

import math

import numpy as np
import pytest
from fakes import FakeDataSource, FakeEngine, FakeReward, prompt, sample

from vime.backends.vllm.answers import make_sample, not_finite, response_arrays
from vime.config.schema import Config
from vime.errors import VimeError
from vime.record import read
from vime.record.writer import write
from vime.rollout.live import LiveRollouts
from vime.rollout.statistics import statistics
from vime.train.steps import check_trainable
from vime.types import RolloutBatch, Status

FAILURE = "1 of 2 log-probs are not finite, the first (nan) at response token 1"


def broken(prompt, index, seed):
    """Group 1 is broken in its second sample."""
    is_bad = (prompt.group_id, index) == (1, 1)
    arrays = response_arrays("r", [0, 0], [-1.0, math.nan if is_bad else -2.0], must_be_finite=False)
    return make_sample(prompt, index, seed, arrays, Status.COMPLETED, (0, 0), "")


def produced(is_rollout_only, script=broken):
    config = Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"prompts": ["a.jsonl"]},
            "rollout": {"rollout_batch_size": 3, "num_samples_per_prompt": 2},
            "debug": {"rollout_only": is_rollout_only},
        }
    )
    return LiveRollouts(config, FakeDataSource(), [FakeEngine(script)], FakeReward()).produce(0)


def test_a_sample_says_why_it_failed():
    assert not_finite(np.array([-1.0, -2.0], np.float32)) is None
    found = broken(prompt(1), 1, 0)
    assert (found.status, found.metadata) == (Status.FAILED, {"failure": FAILURE})
    assert broken(prompt(1), 0, 0).metadata == {}


def test_in_training_the_engine_still_refuses():
    with pytest.raises(VimeError, match="1 of 2 log-probs are not finite"):
        response_arrays("r", [0, 0], [-1.0, math.nan])


def test_without_training_the_group_stays_unscored_in_its_place():
    """Case R18."""
    batch = produced(is_rollout_only=True)
    assert batch.group_ids_N.tolist() == [0, 0, 1, 1, 2, 2]
    assert [row["status"] for row in batch.rows] == ["completed"] * 3 + ["failed"] + ["completed"] * 2
    assert np.isnan(batch.rewards_N).tolist() == [False, False, True, True, False, False]
    assert batch.header.counts == {"status_completed": 5, "status_failed": 1}
    assert np.isnan(batch.rollout_log_probs_T).sum() == 1
    found = statistics(batch)
    assert (found["rollout/status/failed"], found["rollout/raw_reward"]) == (1, 0.5)
    assert found["rollout/rollout_log_probs"] == pytest.approx((6 * -1.0 + 5 * -2.0) / 11)


def test_for_training_the_group_is_replaced():
    batch = produced(is_rollout_only=False)
    assert batch.group_ids_N.tolist() == [0, 0, 2, 2, 3, 3]
    assert batch.header.counts == {"dropped_failed": 1, "status_completed": 6}


def test_a_sample_that_failed_otherwise_is_replaced_as_before():
    def script(prompt, index, seed):
        status = Status.FAILED if (prompt.group_id, index) == (1, 1) else Status.COMPLETED
        return sample(prompt.group_id, index, status=status)

    assert produced(is_rollout_only=True, script=script).group_ids_N.tolist() == [0, 0, 2, 2, 3, 3]


def test_the_record_keeps_them_as_they_are_and_training_refuses_them(tmp_path):
    batch = produced(is_rollout_only=True)
    write(tmp_path / "data_0.pt", batch)
    again = read(tmp_path / "data_0.pt")
    assert again.rollout_log_probs_T.tobytes() == batch.rollout_log_probs_T.tobytes()
    assert again.rows == batch.rows
    with pytest.raises(VimeError, match=r"sample 1/0 of rollout 0 has reward nan"):
        check_trainable(again)
    with pytest.raises(VimeError, match="sample 1/1 of rollout 0 has status failed: it cannot be trained on"):
        check_trainable(again.select([0, 1, 3]))


def test_a_rollout_of_nothing_else_is_complete():
    def all_bad(prompt, index, seed):
        arrays = response_arrays("r", [0], [math.nan], must_be_finite=False)
        return make_sample(prompt, index, seed, arrays, Status.TRUNCATED, (0, 0), "")

    batch = produced(is_rollout_only=True, script=all_bad)
    assert isinstance(batch, RolloutBatch)
    assert len(batch) == 6
    assert math.isnan(statistics(batch)["rollout/raw_reward"])
