"""Reported faults of trainers, planted on real processes."""

from __future__ import annotations

import case_jobs
import jobs
import numpy as np
import pytest
import random_models


def test_a_step_without_signal_changes_no_bit(pool, tiny):
    """Case T09: no group has a spread of rewards. Adam's momentum must not move the weights, and it is said."""
    settings = jobs.config(tiny(), algo={"kl_coef": 0.0}, train={"weight_decay": 0.1})
    out = pool.run(1, case_jobs.flat_step, settings)[0]
    assert out["same"]
    assert out["flat"].is_skipped
    assert "every advantage is 0" in out["flat"].skip_reason


def test_a_penalty_is_a_signal_of_its_own(pool, tiny):
    """Case T09: with a KL penalty there is something to learn though no reward differs."""
    out = pool.run(1, case_jobs.flat_step, jobs.config(tiny(), algo={"kl_coef": 0.1}))[0]
    assert not out["flat"].is_skipped
    assert out["flat"].grad_norm > 0
    assert not out["same"]


@pytest.mark.parametrize("parallel", [{"dp": 2}, {"cp": 2}, {"dp": 4}], ids=str)
def test_the_update_does_not_depend_on_the_number_of_ranks(pool, tiny, parallel):
    """Case T15: one trained token on one rank, nine on another: one mean over all tokens, not a mean of means.

    adam_eps = 1 makes Adam's first update proportional to the gradient, so that rounding stays rounding.
    """
    train = {"adam_eps": 1.0, "lr": 0.1, "max_tokens_per_micro_batch": 1000}
    hf = random_models.hf_log_probs(tiny(), [s.token_ids for s in case_jobs.uneven().samples()])
    base = pool.run(1, case_jobs.uneven_step, jobs.config(tiny(), train=train), hf)[0]
    settings = jobs.config(tiny(), train=train, parallel=parallel)
    for out in pool.run(settings.parallel.world_size, case_jobs.uneven_step, settings, hf):
        assert out["stats"].num_tokens == base["stats"].num_tokens == 16
        assert out["stats"].loss == pytest.approx(base["stats"].loss, abs=1e-6)
        assert out["stats"].grad_norm == pytest.approx(base["stats"].grad_norm, abs=1e-6)
        for name, value in base["weights"].items():
            assert np.abs(out["weights"][name] - value).max() <= 1e-6, name
    start = random_models.tensors(tiny())
    assert max(np.abs(start[name] - value).max() for name, value in base["weights"].items()) > 1e-3
