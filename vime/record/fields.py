"""The fields of a sample that can be asked for, sorted by and exported: one list for all samples of a rollout."""

from __future__ import annotations

from typing import Any

import numpy as np

from vime.record.names import FIELDS
from vime.types import RolloutBatch


class Fields:
    """Columns of one rollout by field name; each is computed when it is first asked for. N samples, T tokens.

    ``fields["reward"]`` is a list of N plain values, None where a sample has none (no reward, no sampled token).
    """

    def __init__(self, batch: RolloutBatch) -> None:
        self.batch = batch
        self._columns: dict[str, list[Any]] = {}

    def __len__(self) -> int:
        return len(self.batch)

    def __getitem__(self, name: str) -> list[Any]:
        if name not in self._columns:
            self._columns[name] = self._compute(name)
        return self._columns[name]

    def row(self, i: int) -> dict[str, Any]:
        """All fields of sample ``i``."""
        return {name: self[name][i] for name in FIELDS}

    def _compute(self, name: str) -> list[Any]:
        batch = self.batch
        if name == "rollout_id":
            return [batch.rollout_id] * len(batch)
        if name == "reward":
            return [None if r != r else r for r in batch.rewards_N.tolist()]
        if name in ("num_sampled", "mean_log_prob", "min_log_prob"):
            self._columns |= _of_sampled_tokens(batch)
            return self._columns[name]
        if name in _ARRAYS:
            return getattr(batch, _ARRAYS[name]).tolist()
        key = _ROWS.get(name, name)
        return [row[key] for row in batch.rows]


_ARRAYS = {
    "group_id": "group_ids_N",
    "index": "indices_N",
    "prompt_len": "prompt_lens_N",
    "response_len": "response_lens_N",
}
_ROWS = {"prompt": "prompt_text", "weight_version": "weight_version_max"}


def _of_sampled_tokens(batch: RolloutBatch) -> dict[str, list[Any]]:
    """num_sampled, mean_log_prob (float64 sums) and min_log_prob of every sample, over tokens with the mask True."""
    if not len(batch):
        return {"num_sampled": [], "mean_log_prob": [], "min_log_prob": []}
    starts, mask_T = batch.offsets[:-1], batch.loss_mask_T
    log_probs_T = batch.rollout_log_probs_T.astype(np.float64)
    num_N = np.add.reduceat(mask_T, starts, dtype=np.int64)
    sum_N = np.add.reduceat(np.where(mask_T, log_probs_T, 0.0), starts)
    min_N = np.minimum.reduceat(np.where(mask_T, log_probs_T, np.inf), starts)
    counts = num_N.tolist()
    sums, minima = sum_N.tolist(), min_N.tolist()
    return {
        "num_sampled": counts,
        "mean_log_prob": [s / n if n else None for s, n in zip(sums, counts, strict=True)],
        "min_log_prob": [m if n else None for m, n in zip(minima, counts, strict=True)],
    }
