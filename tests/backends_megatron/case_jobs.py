"""Jobs of ``test_trainer_cases``, run on real trainer processes."""

from __future__ import annotations

from typing import Any

import jobs
import numpy as np

from vime.config.schema import Config
from vime.types import RolloutBatch, Sample, WeightManifest
from vime.weights.shm import BufferPlan, WritePlan, write_weights


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


def push(rank: int, world_size: int, port: int, settings: Config, path: str) -> WeightManifest | None:
    """Write the weights into the shared file at ``path`` as the transport does: rank 0 alone, the others take part."""
    with jobs.trainer(settings, rank, world_size, port) as made:
        plan = WritePlan(BufferPlan.of(made.weight_specs()), path, 1)
        if rank == 0:
            return write_weights(plan, made.named_weights())
        for _ in made.named_weights():
            pass
        return None


def infinite_gradient(rank: int, world_size: int, port: int, settings: Config) -> dict[str, Any]:
    """One good step, then one in which a single weight gets an infinite gradient while the loss is finite."""
    from vime.backends.megatron.weights import named_parameters
    from vime.errors import VimeError

    rollout = jobs.batch()
    with jobs.trainer(settings, rank, world_size, port) as made:
        data = jobs.train_data(rollout, jobs.log_probs(made, rollout))
        made.step(data)
        weight = dict(named_parameters(made.policy))["decoder.layers.1.mlp.linear_fc2.weight"]
        hook = weight.register_hook(lambda gradient: gradient * float("inf"))
        before = jobs.snapshot(made)
        try:
            found = made.step(data)
        except VimeError as error:
            found = error.message
        hook.remove()
        same = all(np.array_equal(a, b) for a, b in zip(before, jobs.snapshot(made), strict=True))
        return {"found": found, "same": same, "next": made.step(data)}
