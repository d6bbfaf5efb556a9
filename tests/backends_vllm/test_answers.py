"""What may not pass from the engine into training data (cases R03, R05)."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import make_prompt

from vime.backends.vllm.answers import make_sample, response_arrays
from vime.errors import VimeError
from vime.types import Status


@pytest.mark.parametrize(
    ("token_ids", "log_probs", "log_prob_ids", "message"),
    [
        ([5, 6], [-1.0], None, "request 0-3/1: 2 tokens but 1 log-probs"),
        ([5, 6], None, None, r"request 0-3/1: log-probs were asked for and are missing \(2 tokens, 0 log-probs\)"),
        ([5, 6], [-1.0, float("nan")], None, r"1 of 2 log-probs are not finite, the first \(nan\) at response token 1"),
        ([5, 6], [float("-inf"), -1.0], None, r"not finite, the first \(-inf\) at response token 0"),
        ([5, 6], [-1.0, -2.0], [5, 7], "log-prob 1 of 2 belongs to another token"),
    ],
)
def test_bad_log_probs_are_refused(token_ids, log_probs, log_prob_ids, message: str) -> None:
    with pytest.raises(VimeError, match=message):
        response_arrays("0-3/1", token_ids, log_probs, log_prob_ids)


def test_a_true_zero_and_an_empty_answer_are_kept() -> None:
    ids, log_probs = response_arrays("r", [5, 6], [0.0, -0.5], [5, 6])
    assert (ids.tolist(), log_probs.tolist(), ids.dtype, log_probs.dtype) == ([5, 6], [0.0, -0.5], np.int32, np.float32)
    empty = response_arrays("r", [], [])
    sample = make_sample(make_prompt(3), 1, 9, empty, Status.ABORTED, (2, 2), "")
    assert (sample.response_len, sample.loss_mask.any(), sample.seed, sample.weight_version_min) == (0, False, 9, 2)
