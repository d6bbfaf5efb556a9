"""Numbers and warnings about one rollout; formulas beside the names in ``vime/metrics.py``.

log-probs in nats; T tokens, N samples. A group is all samples with one group id, wherever they stand in the batch.
Rewards are missing where they are NaN.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from dataclasses import dataclass

import numpy as np

from vime.config.schema import Config
from vime.types import RolloutBatch

REPETITION_CHARS = 10_000
REPETITION_RATIO = 10.0
MAX_EXPONENT = 400
"""Squares of values below 2 to this power can be summed; larger ones are scaled by a power of two first."""


def statistics(batch: RolloutBatch) -> dict[str, float]:
    """All ``rollout/`` metrics of a batch. Rewards that are missing (NaN) are left out of their statistics.

    rollout/reward/std is the standard deviation over all samples (not per group, no Bessel correction);
    rollout/zero_std/count_R counts the groups whose rewards all equal R (one decimal).
    """
    rewards_N = batch.rewards_N[~np.isnan(batch.rewards_N)]
    lengths_N, sampled_T = batch.response_lens_N, batch.loss_mask_T
    rewards = rewards_by_group(batch)
    constant = Counter(next(iter(values)) for values in rewards.values() if len(values) == 1)
    mean, std = mean_and_std(rewards_N)
    out: dict[str, float] = {
        "rollout/num_samples": len(batch),
        "rollout/num_groups": len(np.unique(batch.group_ids_N)),
        "rollout/num_tokens": batch.num_tokens,
        "rollout/num_response_tokens": int(lengths_N.sum()),
        "rollout/raw_reward": mean,
        "rollout/truncated_ratio": _share(batch, "truncated"),
        "rollout/zero_spread_group_share": sum(constant.values()) / len(rewards) if rewards else math.nan,
        "rollout/num_reward_timeouts": num_reward_timeouts(batch),
        "rollout/repetition": float(np.mean([repeats(row["text"]) for row in batch.rows])) if len(batch) else 0.0,
    }
    sampled_T = sampled_T & np.isfinite(batch.rollout_log_probs_T)  # else the sample is FAILED, and counted as such
    if sampled_T.any():
        out["rollout/rollout_log_probs"] = float(batch.rollout_log_probs_T[sampled_T].astype(np.float64).mean())
    if len(rewards_N):
        least, most = float(rewards_N.min()), float(rewards_N.max())
        out |= {"rollout/reward/std": std, "rollout/reward/min": least, "rollout/reward/max": most}
    out |= _lengths("rollout/response_len/", lengths_N, ("mean", "median", "min", "max", "p95"))
    out |= _lengths("rollout/prompt_len/", batch.prompt_lens_N, ("mean", "min", "max"))
    for reward, count in sorted(constant.items()):
        name = f"rollout/zero_std/count_{round(reward, 1) + 0.0:.1f}"  # + 0.0: -0.04 is 0.0, not -0.0
        out[name] = out.get(name, 0) + count
    out |= {f"rollout/status/{s}": n for s, n in sorted(Counter(row["status"] for row in batch.rows).items())}
    return out | {f"rollout/dropped/{cause}": n for cause, n in dropped_groups(batch).items()}


def rewards_by_group(batch: RolloutBatch) -> dict[int, set[float]]:
    """Group id -> the different rewards of its samples; a group of which no sample has a reward is left out."""
    rewards: dict[int, set[float]] = {}
    for group_id, reward in zip(batch.group_ids_N.tolist(), batch.rewards_N.tolist(), strict=True):
        if not math.isnan(reward):
            rewards.setdefault(group_id, set()).add(reward)
    return rewards


def mean_and_std(values_N: np.ndarray) -> tuple[float, float]:
    """Mean and population standard deviation; NaN over nothing. Neither overflows where the values are finite."""
    if not len(values_N):
        return math.nan, math.nan
    exponent = int(np.frexp(np.abs(values_N).max())[1])
    exponent = exponent if exponent > MAX_EXPONENT else 0
    scaled_N = np.ldexp(values_N.astype(np.float64), -exponent)
    return float(np.ldexp(scaled_N.mean(), exponent)), float(np.ldexp(scaled_N.std(), exponent))


def dropped_groups(batch: RolloutBatch) -> dict[str, int]:
    """Cause -> groups left out of the batch, from its header."""
    prefix = "dropped_"
    return {k.removeprefix(prefix): n for k, n in sorted(batch.header.counts.items()) if k.startswith(prefix)}


def warnings(batch: RolloutBatch, config: Config, *, is_evaluation: bool = False) -> list[str]:
    """What a user should hear about this rollout, one line each. An evaluation has a temperature of its own."""
    lines = []
    if len(batch) and _share(batch, "truncated") == 1.0:
        lines.append(
            "every sample reached the length limit (sampling.max_response_len="
            f"{batch.header.sampling.get('max_response_len', config.rollout.sampling.max_response_len)}): "
            "does the model stop? stop ids: "
            f"{batch.header.stop_token_ids or 'see the engine log'}"
        )
    if dropped := dropped_groups(batch):
        lines.append("groups left out: " + ", ".join(f"{cause} {n}" for cause, n in dropped.items()))
    sampled, trained = batch.header.sampling.get("temperature"), config.rollout.sampling.temperature
    if sampled not in (None, trained) and config.needs_trainer and not is_evaluation:
        lines.append(
            f"the rollout was sampled at temperature {sampled:g}, the trainer's log-probs are those of "
            f"rollout.sampling.temperature = {trained:g}"
        )
    if late := num_reward_timeouts(batch):
        limit, score = config.reward.timeout_seconds, config.reward.score_on_timeout
        lines.append(
            f"the reward of {late} of {len(batch)} samples ran out of time ({limit:g} s) and counts as {score}"
        )
    mixed = sum(row["weight_version_min"] != row["weight_version_max"] for row in batch.rows)
    if mixed:
        lines.append(f"{mixed} of {len(batch)} samples were generated by more than one weight version")
    return lines


@dataclass
class SpreadWatch:
    """Warns once when no group of ``patience`` rollouts in a row had a spread of rewards: nothing can be learned."""

    patience: int = 3
    num_flat: int = 0

    def update(self, metrics: dict[str, float]) -> str | None:
        """Takes the ``statistics`` of the next rollout; the warning, when it is due."""
        self.num_flat = self.num_flat + 1 if metrics["rollout/zero_spread_group_share"] == 1.0 else 0
        if self.num_flat != self.patience:
            return None
        return (
            f"in {self.patience} rollouts no group had a spread of rewards: advantages, loss and gradient are 0; "
            "is the reward right, and can the model sometimes solve the prompts?"
        )


def num_reward_timeouts(batch: RolloutBatch) -> int:
    """Samples that have ``reward.score_on_timeout`` in place of a verdict (``vime.reward.pool`` marks them)."""
    return sum(row["metadata"].get("reward_timeout") is True for row in batch.rows)


def repeats(text: str) -> bool:
    """Whether the last 10,000 characters shrink more than tenfold under zlib."""
    tail = text[-REPETITION_CHARS:].encode("utf-8", "surrogatepass")
    return len(tail) > REPETITION_RATIO * len(zlib.compress(tail)) if tail else False


def _share(batch: RolloutBatch, status: str) -> float:
    return sum(row["status"] == status for row in batch.rows) / len(batch) if len(batch) else 0.0


def _lengths(prefix: str, values_N: np.ndarray, which: tuple[str, ...]) -> dict[str, float]:
    if not len(values_N):
        return {}
    values = {
        "mean": values_N.mean(),
        "median": np.median(values_N),
        "min": values_N.min(),
        "max": values_N.max(),
        "p95": np.percentile(values_N, 95),
    }
    return {prefix + name: float(values[name]) for name in which}
