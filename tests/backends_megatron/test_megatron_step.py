"""One optimizer step in one process: what it must not depend on, what it must refuse, what it must leave alone."""

from __future__ import annotations

import jobs
import numpy as np
import pytest
import random_models


def test_nothing_depends_on_packing_or_micro_batches(pool, tiny):
    """All in one, small, one sequence each: log-probs bitwise, gradients to rounding."""
    first, *others = pool.run(1, jobs.steps, jobs.config(tiny()), [1000, 70, 20, 1])[0]
    for other in others:
        assert np.array_equal(first["scored"], other["scored"])
        assert other["at_rest"].grad_norm == 0.0
        assert other["stats"].loss == pytest.approx(first["stats"].loss, rel=1e-6)
        assert other["stats"].grad_norm == pytest.approx(first["stats"].grad_norm, rel=1e-6)
        assert other["stats"].num_tokens == first["stats"].num_tokens
        for name, gradient in first["gradients"].items():
            assert np.linalg.norm(other["gradients"][name] - gradient) <= 2e-6 * np.linalg.norm(gradient), name


def test_temperature_divides_the_logits(pool, tiny):
    sampling = {"sampling": {"temperature": 0.7}}
    outcome = pool.run(1, jobs.steps, jobs.config(tiny(), rollout=sampling), [1000])[0][0]
    sequences = [s.token_ids for s in jobs.batch().samples()]
    assert np.abs(outcome["scored"] - random_models.hf_log_probs(tiny(), sequences, 0.7)).max() < 1e-5
    assert np.abs(outcome["scored"] - random_models.hf_log_probs(tiny(), sequences)).max() > 0.1
    assert outcome["at_rest"].grad_norm == 0.0


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_step_that_cannot_be_taken_changes_no_bit(pool, tiny, policy):
    out = pool.run(1, jobs.edge_steps, jobs.config(tiny(), train={"nan_policy": policy}))[0]
    assert out["masked"].is_skipped
    assert "no trainable token" in out["masked"].skip_reason
    nan, weight = out["nan"], out["nan_weight"]
    if policy == "skip":
        assert nan.is_skipped
        assert np.isnan(nan.loss)
        assert weight.is_skipped
        nan, weight = nan.skip_reason, weight.skip_reason
    assert "loss not finite in samples (1) 3/0" in nan
    assert "gradient not finite in (47) model.embed_tokens.weight, model.layers.0.input_layernorm.weight" in nan
    assert ", and 37 more" in nan
    assert "loss not finite in samples (7)" in weight
    assert out["same"]
    assert not out["off_mask"].is_skipped
    assert np.isfinite(out["off_mask"].loss)


def test_first_answer_token_carries_loss(pool, tiny):
    """Case T13: prompt of 3, answer of 2 tokens: exactly the positions that predict answer tokens 1 and 2 count.

    old is 0.01 and 0.02 above the policy there (and 9 off elsewhere), advantages 1: the ratios are exp(-0.01) and
    exp(-0.02), inside the clip range, so loss = -(exp(-0.01) + exp(-0.02)) / 2 and ppo_kl = (0.01 + 0.02) / 2.
    """
    out = pool.run(1, jobs.first_answer_token, jobs.config(tiny()))[0]
    stats = out["stats"]
    assert stats.num_tokens == 2
    assert stats.loss == pytest.approx(-(np.exp(-0.01) + np.exp(-0.02)) / 2, rel=1e-5)
    assert stats.metrics["train/ppo_kl"] == pytest.approx(0.015, rel=1e-4)
    assert stats.metrics["train/kl_loss"] == 0.0
    assert out["scored"][0] == 0.0
    assert (out["scored"][1:] < 0).all()
    constant = out["constant"]  # Dr. GRPO: the loss is a sum over a constant, and a mean stays a mean
    assert constant.loss == pytest.approx(-(np.exp(-0.01) + np.exp(-0.02)) / 8, rel=1e-5)
    assert constant.metrics["train/pg_loss"] == pytest.approx(constant.loss, rel=1e-6)
    assert constant.metrics["train/ppo_kl"] == pytest.approx(0.015, rel=1e-4)


@pytest.mark.parametrize(("world_size", "temperature"), [(1, 1.0), (2, 1.0), (2, 0.7)])
def test_log_probs_and_entropy_against_float64(pool, world_size, temperature):
    for found in pool.run(world_size, jobs.vocab_parallel, temperature):
        assert found["log_probs"] < 1e-5
        assert found["entropy"] < 2e-5
        assert found["gradient"] < 1e-5
        assert found["untouched"]
        assert found["same_without_entropy"]


@pytest.mark.parametrize("parallel", [{}, {"dp": 2, "distributed_optimizer": True}], ids=str)
def test_offload_gives_everything_back_bitwise(pool, tiny, parallel):
    settings = jobs.config(tiny(), parallel=parallel)
    for out in pool.run(settings.parallel.world_size, jobs.offload_round_trip, settings):
        assert out["left"] == 0
        assert out["num_bytes"] > 4 * 139968 * 2
        assert out["same"]
        assert out["same_ref"]
        assert out["on_cpu"] == (0, None)
        assert np.isfinite(out["loss"])
        assert out["memory"]["rss"] > 0


@pytest.mark.parametrize("parallel", [{"dp": 2}, {"pp": 2}], ids=str)
def test_a_late_rank_is_not_waited_for_without_end(pool, tiny, parallel):
    settings = jobs.config(tiny(), parallel=parallel, train={"step_timeout_seconds": 3.0})
    said = pool.run(2, jobs.late, settings, timeout=60)[0]
    assert said.startswith("trainer rank 0: step waited longer than train.step_timeout_seconds = 3 for another rank")


def test_samples_the_model_cannot_read_are_named(pool, tiny):
    settings = jobs.config(tiny("qwen3", True, 131), parallel={"tp": 2})
    for said in pool.run(2, jobs.unreadable, settings):
        too_long = "sample 1/0: 600 tokens, the model has 512 positions"
        no_token = "sample 2/0: token 4 is 131, outside 0..130"
        assert said == [too_long, too_long, no_token, no_token]
