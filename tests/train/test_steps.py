"""Advantages, loss weights and normalisers of the optimizer steps of one rollout."""

import numpy as np
import pytest

from vime.config.schema import Config
from vime.errors import VimeError
from vime.train.statistics import log_prob_metrics
from vime.train.steps import train_steps
from vime.types import RolloutBatch, Sample, Status


def config(**sections):
    base = {"model": {"path": "m"}, "data": {"prompts": ["p"]}}
    rollout = {"rollout_batch_size": 2, "num_samples_per_prompt": 2, "sampling": {"max_response_len": 4}}
    return Config(**base, rollout=rollout, **sections)


def sample(group, index, prompt_len, response_len, reward=1.0, status=Status.COMPLETED, trained=True):
    length = prompt_len + response_len
    mask = np.arange(length) >= prompt_len if trained else np.zeros(length, bool)
    return Sample(group, index, np.arange(length), prompt_len, mask, np.zeros(length), reward=reward, status=status)


def rollout(*samples):
    return RolloutBatch.from_samples(0, list(samples))


def four(**kwargs):
    return rollout(
        sample(0, 0, 3, 2, reward=1.0), sample(0, 1, 3, 4, reward=0.0), sample(1, 0, 2, 1), sample(1, 1, 2, 3, **kwargs)
    )


def steps(cfg, batch):
    return train_steps(cfg, batch, np.zeros(batch.num_tokens, np.float32), None)


def test_only_answer_tokens_carry_loss():
    """Case T13: prompt of 3, answer of 2: exactly the two answer tokens, each at its own position."""
    (step,) = steps(config(), four())
    assert step.loss_weight_T[:5].tolist() == [0, 0, 0, 1, 1]
    assert step.loss_weight_T.sum() == 2 + 4 + 1 + 3
    assert step.normalizer == 10


def test_sequence_mean_weighs_sequences_equally():
    (step,) = steps(config(algo={"loss_normalization": "sequence_mean"}), four())
    ends = np.cumsum(step.lengths_N)
    per_sample = [step.loss_weight_T[b - n : b].sum() for n, b in zip(step.lengths_N, ends, strict=True)]
    assert per_sample == pytest.approx([1, 1, 1, 1])
    assert step.normalizer == 4


def test_constant_divides_by_the_length_limit():
    (step,) = steps(config(algo={"loss_normalization": "constant"}), four())
    assert step.loss_weight_T.sum() == pytest.approx(10 / 4)
    assert step.normalizer == 4


@pytest.mark.parametrize("normalization", ["token_mean", "sequence_mean"])
def test_a_fully_masked_sample_adds_nothing(normalization):
    """Case T12: a prompt that filled the window is worth 0, not 0/0."""
    (step,) = steps(config(algo={"loss_normalization": normalization}), four(trained=False))
    assert np.isfinite(step.loss_weight_T).all()
    assert step.loss_weight_T[-5:].sum() == 0
    assert step.normalizer == (7 if normalization == "token_mean" else 3)


def test_two_steps_share_the_rollout_in_order():
    first, second = steps(config(train={"num_steps_per_rollout": 2}), four())
    assert first.sample_ids == ["0/0", "0/1"]
    assert second.sample_ids == ["1/0", "1/1"]
    assert first.advantages_T[3] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_sample_without_a_finite_reward_is_never_trained_on(reward):
    """Case T08: one bad reward must not become a NaN advantage for the whole group."""
    with pytest.raises(VimeError, match="sample 1/1 of rollout 0 has reward"):
        steps(config(), four(reward=reward))


def test_aborted_samples_are_never_trained_on():
    """Case R01."""
    with pytest.raises(VimeError, match="sample 1/1 of rollout 0 has status aborted"):
        steps(config(), four(status=Status.ABORTED))


def test_a_short_rollout_is_refused():
    with pytest.raises(VimeError, match="4 samples"):
        steps(config(train={"global_batch_size": 3}), four())


def test_a_step_has_a_sample_for_every_data_parallel_rank():
    assert len(steps(config(parallel={"dp": 4}), four())) == 1
    with pytest.raises(VimeError, match=r"4 samples per optimizer step, fewer than parallel\.dp = 5 ranks"):
        steps(config(parallel={"dp": 5}), four())


def test_log_prob_metrics_use_trained_tokens_only():
    batch = rollout(sample(0, 0, 1, 2))
    old, ref = np.array([9.0, -1.0, -2.0], np.float32), np.array([9.0, -1.5, -2.5], np.float32)
    got = log_prob_metrics(batch, old, ref)
    assert got["rollout/log_probs"] == -1.5
    assert got["rollout/ref_log_probs"] == -2.0
    assert got["rollout/kl"] == 0.5
    assert got["train/train_rollout_logprob_abs_diff"] == 1.5
    assert got["train/train_rollout_logprob_abs_diff/max"] == 2.0
