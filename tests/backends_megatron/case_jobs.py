"""Jobs of ``test_trainer_cases``, run on real trainer processes."""

from __future__ import annotations

from typing import Any

import jobs
import numpy as np

from vime.config.schema import Config
from vime.types import RolloutBatch, Sample


def flat_step(rank: int, world_size: int, port: int, settings: Config) -> dict[str, Any]:
    """A step that gives Adam momentum, then one whose advantages are all 0."""
    rollout = jobs.batch()
    with jobs.trainer(settings, rank, world_size, port) as made:
        scored = jobs.log_probs(made, rollout)
        made.step(jobs.train_data(rollout, scored))
        before = jobs.snapshot(made)
        flat = made.step(jobs.train_data(rollout, scored, advantages_T=np.zeros_like(scored)))
        after = jobs.snapshot(made)
        return {"flat": flat, "same": all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))}


def uneven() -> RolloutBatch:
    """Sample 0 trains one token, sample 1 nine, the others between; every rank of dp 4 gets another number."""
    trained = (1, 9, 4, 2)
    rng = np.random.default_rng(1)
    samples = []
    for i, count in enumerate(trained):
        length = 12 + 3 * i
        mask = np.arange(length) >= length - count
        samples.append(Sample(i, 0, rng.integers(0, jobs.VOCAB, length), 2, mask, np.zeros(length)))
    return RolloutBatch.from_samples(0, samples)


def uneven_step(rank: int, world_size: int, port: int, settings: Config, hf: np.ndarray) -> dict[str, Any]:
    """One step on ``uneven``; ``hf``: its log-probs from transformers, so that the data is alike in every layout."""
    rollout = uneven()
    with jobs.trainer(settings, rank, world_size, port) as made:
        stats = made.step(jobs.train_data(rollout, hf))
        return {"stats": stats, "weights": jobs.arrays(made.named_weights())}
