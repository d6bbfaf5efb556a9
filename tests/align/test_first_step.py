"""The first-step checks pass on equal numbers and catch one planted token."""

import numpy as np
import pytest

from vime.align.first_step import engine_equals_trainer, engine_limit, reference_equals_policy
from vime.types import RolloutBatch, Sample, Verdict


def batch(masked=True):
    mask = np.array([False, False, True, True]) if masked else np.zeros(4, bool)
    return RolloutBatch.from_samples(0, [Sample(5, i, np.arange(4), 2, mask, -np.ones(4)) for i in range(2)])


def test_reference_equal_passes_and_one_ulp_fails():
    log_probs = np.full(8, -1.0, np.float32)
    assert reference_equals_policy(batch(), log_probs, log_probs.copy()).verdict == Verdict.PASS
    ref = log_probs.copy()
    ref[6] = np.nextafter(ref[6], 0)
    check = reference_equals_policy(batch(), log_probs, ref)
    assert check.verdict == Verdict.FAIL
    assert "sample 5/1 position 2" in check.evidence[0]


def test_differences_off_the_mask_do_not_count():
    log_probs = np.full(8, -1.0, np.float32)
    ref = log_probs.copy()
    ref[0] = -3.0
    assert reference_equals_policy(batch(), log_probs, ref).verdict == Verdict.PASS


def test_engine_band_follows_the_dtype():
    log_probs = np.full(8, -1.0, np.float32)
    log_probs[7] -= 1e-3
    assert engine_equals_trainer(batch(), log_probs, "bfloat16", 4).verdict == Verdict.PASS
    check = engine_equals_trainer(batch(), log_probs, "float32", 4)
    assert check.verdict == Verdict.FAIL
    assert "sample 5/1 position 3" in check.evidence[0]


def test_the_float32_band_grows_with_depth():
    assert engine_limit("float32", 2) == engine_limit("float32", 4) == 1e-5
    assert engine_limit("float32", 30) == pytest.approx(1.4e-4)
    log_probs = np.full(8, -1.0, np.float32)
    log_probs[7] -= 4e-5
    assert engine_equals_trainer(batch(), log_probs, "float32", 30).verdict == Verdict.PASS
    assert engine_equals_trainer(batch(), log_probs, "float32", 4).verdict == Verdict.FAIL


def test_a_record_of_later_weights_is_not_compared_with_the_first():
    log_probs = np.full(8, -3.0, np.float32)
    recorded = batch()
    recorded.rows[1]["weight_version_max"] = 2
    check = engine_equals_trainer(recorded, log_probs, "float32", 4)
    assert check.verdict == Verdict.NOT_TESTED
    assert "weights v2" in check.cause


def test_nothing_to_compare_is_not_a_pass():
    zeros = np.zeros(8, np.float32)
    assert reference_equals_policy(batch(), zeros, None).verdict == Verdict.SKIP
    assert reference_equals_policy(batch(masked=False), zeros, zeros).verdict == Verdict.NOT_TESTED
    assert engine_equals_trainer(batch(masked=False), zeros, "float32", 4).verdict == Verdict.NOT_TESTED
