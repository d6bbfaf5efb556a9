"""Numbers of a scored rollout: means over trained tokens, and the distance between engine and trainer."""

from __future__ import annotations

import numpy as np

from vime.types import RolloutBatch


def log_prob_metrics(
    batch: RolloutBatch, old_log_probs_T: np.ndarray, ref_log_probs_T: np.ndarray | None
) -> dict[str, float]:
    """Metrics over trained tokens (float64 sums); empty if there is none. Formulas: ``vime.metrics``."""
    mask_T = batch.loss_mask_T
    if not mask_T.any():
        return {}
    old, rollout = old_log_probs_T[mask_T].astype(np.float64), batch.rollout_log_probs_T[mask_T].astype(np.float64)
    gap = np.abs(old - rollout)
    out = {
        "rollout/log_probs": float(old.mean()),
        "rollout/rollout_log_probs": float(rollout.mean()),
        "train/train_rollout_logprob_abs_diff": float(gap.mean()),
        "train/train_rollout_logprob_abs_diff/max": float(gap.max()),
    }
    if ref_log_probs_T is not None:
        ref = ref_log_probs_T[mask_T].astype(np.float64)
        out["rollout/ref_log_probs"] = float(ref.mean())
        out["rollout/kl"] = float((old - ref).mean())
    return out
