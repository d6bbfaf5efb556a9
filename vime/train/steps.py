"""A scored rollout -> the data of its optimizer steps: advantages per token, loss weights, one normaliser a step."""

from __future__ import annotations

import numpy as np

from vime import algo
from vime.config.schema import Config
from vime.errors import VimeError
from vime.train.packing import token_index
from vime.types import RolloutBatch, Status, TrainData


def check_trainable(batch: RolloutBatch) -> None:
    """Refuse samples that must never be trained on: without a finite reward, aborted or failed (cases T08, R01)."""
    for i, row in enumerate(batch.rows):
        name = f"sample {batch.group_ids_N[i]}/{batch.indices_N[i]} of rollout {batch.rollout_id}"
        if not Status(row["status"]).is_trainable:
            raise VimeError(f"{name} has status {row['status']}: it cannot be trained on")
        if not np.isfinite(batch.rewards_N[i]):
            raise VimeError(f"{name} has reward {batch.rewards_N[i]}", "check the reward function on this sample")


def check_size(config: Config, batch: RolloutBatch) -> None:
    """VimeError unless the rollout holds exactly the samples of its optimizer steps."""
    size, num_steps = config.global_batch_size, config.train.num_steps_per_rollout
    if len(batch) == size * num_steps:
        if size < config.parallel.dp:
            text = f"rollout {batch.rollout_id} has {size} samples per optimizer step, fewer than parallel.dp ="
            raise VimeError(f"{text} {config.parallel.dp} ranks", f"set parallel.dp <= {size}")
        return
    right, rest = divmod(len(batch), num_steps)
    raise VimeError(
        f"rollout {batch.rollout_id} has {len(batch)} samples; train.global_batch_size x num_steps_per_rollout = "
        f"{size} x {num_steps} = {size * num_steps}",
        f"set train.global_batch_size={right}"
        if right and not rest
        else "set train.num_steps_per_rollout to a divisor",
    )


def loss_weights(config: Config, batch: RolloutBatch) -> tuple[np.ndarray, np.ndarray]:
    """(loss_weight_T float32 [T], share_N float64 [N]): a step's normaliser is the sum of its samples' shares.

    token_mean: weight 1, share = trained tokens; sequence_mean: weight 1 / trained tokens, share 1 (0 without any);
    constant (Dr. GRPO): weight 1 / max_response_len, share 1. Masked tokens weigh exactly 0.
    """
    mask_T = batch.loss_mask_T.astype(np.float64)
    sample_T = np.repeat(np.arange(len(batch)), batch.lengths_N)
    trained_N = np.bincount(sample_T, weights=mask_T, minlength=len(batch))
    match config.algo.loss_normalization:
        case "token_mean":
            return mask_T.astype(np.float32), trained_N
        case "sequence_mean":
            weight_T = mask_T / np.maximum(trained_N, 1.0)[sample_T]
            return weight_T.astype(np.float32), (trained_N > 0).astype(np.float64)
        case "constant":
            weight_T = mask_T / config.rollout.sampling.max_response_len
            return weight_T.astype(np.float32), np.ones(len(batch))


def train_steps(
    config: Config, batch: RolloutBatch, old_log_probs_T: np.ndarray, ref_log_probs_T: np.ndarray | None
) -> list[TrainData]:
    """``num_steps_per_rollout`` steps of ``global_batch_size`` samples, in the order of the rollout."""
    check_trainable(batch)
    check_size(config, batch)
    advantages_N = algo.find(config.algo.name)(config.algo, batch.rewards_N, batch.group_ids_N)
    advantages_T = np.repeat(advantages_N, batch.lengths_N).astype(np.float32) * batch.loss_mask_T
    weight_T, share_N = loss_weights(config, batch)
    names = [f"{g}/{i}" for g, i in zip(batch.group_ids_N, batch.indices_N, strict=True)]

    def step(rows: np.ndarray) -> TrainData:
        index = token_index(batch.offsets, rows)
        return TrainData(
            offsets=np.concatenate([[0], np.cumsum(batch.lengths_N[rows])]).astype(np.int64),
            token_ids_T=batch.token_ids_T[index],
            loss_weight_T=weight_T[index],
            advantages_T=advantages_T[index],
            rollout_log_probs_T=batch.rollout_log_probs_T[index],
            old_log_probs_T=old_log_probs_T[index],
            ref_log_probs_T=None if ref_log_probs_T is None else ref_log_probs_T[index],
            normalizer=float(share_N[rows].sum()),
            sample_ids=[names[i] for i in rows],
        )

    size = config.global_batch_size
    return [step(np.arange(a, a + size)) for a in range(0, len(batch), size)]
