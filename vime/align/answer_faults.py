"""Faults of ``vime.align.faults`` in what an engine answered, on its way to the trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from vime.errors import UsageError
from vime.types import RolloutBatch


def _shifted(batch: RolloutBatch) -> tuple[RolloutBatch, str]:
    """The value of each sampled token stands at the next one; the last is lost."""
    values_T = batch.rollout_log_probs_T.copy()
    for sampled in _sampled(batch):
        values_T[sampled[1:]] = batch.rollout_log_probs_T[sampled[:-1]]
        values_T[sampled[:1]] = 0.0
    return replace(batch, rollout_log_probs_T=values_T), "log-probs of every sample stand one token late"


def _exchanged(batch: RolloutBatch) -> tuple[RolloutBatch, str]:
    """The two samples with most sampled tokens, of different groups where there are such."""
    found = sorted(enumerate(_sampled(batch)), key=lambda each: -len(each[1]))
    rows = [row for row, sampled in found if len(sampled)]
    if len(rows) < 2:
        raise UsageError("exchanged-log-probs: takes a rollout of two samples with sampled tokens")
    one = rows[0]
    other = next((row for row in rows[1:] if batch.group_ids_N[row] != batch.group_ids_N[one]), rows[1])
    mine, theirs = _sampled(batch)[one], _sampled(batch)[other]
    values_T = batch.rollout_log_probs_T.copy()
    values_T[mine] = np.resize(batch.rollout_log_probs_T[theirs], len(mine))
    said = f"sample {batch.sample(one).name.split()[1]} has the log-probs of {batch.sample(other).name.split()[1]}"
    return replace(batch, rollout_log_probs_T=values_T), said


def _sampled(batch: RolloutBatch) -> list[np.ndarray]:
    """By sample, the indices of the tokens that the policy sampled."""
    ends = zip(batch.offsets[:-1], batch.offsets[1:], strict=True)
    return [a + np.flatnonzero(batch.loss_mask_T[a:b]) for a, b in ends]


ANSWER_FAULTS: dict[str, Callable[[RolloutBatch], tuple[RolloutBatch, str]]] = {
    "shifted-log-probs": _shifted,
    "exchanged-log-probs": _exchanged,
}


def damaged(batch: RolloutBatch, fault: str) -> tuple[RolloutBatch, str]:
    """``batch`` with ``fault`` (one of ``ANSWER_FAULTS``), and in words what was changed; the given one is kept."""
    return ANSWER_FAULTS[fault](batch)
