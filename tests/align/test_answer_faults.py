"""Faults in the answers, by hand-made numbers."""

from __future__ import annotations

import numpy as np
import pytest

from vime.align.answer_faults import ANSWER_FAULTS, damaged
from vime.align.faults import FAULTS, Place
from vime.errors import UsageError
from vime.types import RolloutBatch, Sample


def batch(*lengths):
    """Samples of two prompt tokens and ``lengths`` sampled ones; log-probs -1.0, -1.1, ... / -2.0, -2.1, ..."""
    samples = []
    for group, length in enumerate(lengths):
        mask = np.arange(2 + length) >= 2
        log_probs = np.where(mask, -(group + 1) - 0.1 * (np.arange(2 + length) - 2), 0.0)
        samples.append(Sample(group, 0, np.arange(2 + length), 2, mask, log_probs))
    return RolloutBatch.from_samples(0, samples)


def test_every_fault_of_the_answers_is_here():
    assert set(ANSWER_FAULTS) == {name for name, fault in FAULTS.items() if fault.place == Place.ANSWERS}


def test_shifted_log_probs_stand_one_token_late_in_each_sample():
    given = batch(3, 2)
    found, said = damaged(given, "shifted-log-probs")
    assert found.rollout_log_probs_T.tolist() == pytest.approx([0, 0, 0, -1.0, -1.1, 0, 0, 0, -2.0])
    assert given.rollout_log_probs_T.tolist() == pytest.approx([0, 0, -1.0, -1.1, -1.2, 0, 0, -2.0, -2.1])
    assert "one token late" in said


def test_exchanged_log_probs_are_those_of_another_group_in_the_longest_sample():
    found, said = damaged(batch(2, 3), "exchanged-log-probs")
    assert found.rollout_log_probs_T.tolist() == pytest.approx([0, 0, -1.0, -1.1, 0, 0, -1.0, -1.1, -1.0])
    assert said == "sample 1/0 has the log-probs of 0/0"


def test_one_sample_has_no_other_to_take_from():
    with pytest.raises(UsageError, match="takes a rollout of two samples"):
        damaged(batch(3), "exchanged-log-probs")


def test_log_probs_off_the_mask_stay_zero():
    for fault in ANSWER_FAULTS:
        found, _ = damaged(batch(3, 2), fault)
        assert not found.rollout_log_probs_T[~found.loss_mask_T].any()
