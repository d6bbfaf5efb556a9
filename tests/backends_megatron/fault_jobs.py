"""Jobs of ``test_planted_faults``, run on real trainer processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jobs

from vime.config.schema import Config
from vime.errors import CheckFailed
from vime.weights.manifest import build_manifest
from vime.weights.shards import Shards, written


def step(rank: int, world_size: int, port: int, settings: Config) -> dict[str, Any]:
    """Weights, one step, the losses of the samples on this rank; or the message of the check that failed."""
    rollout = jobs.batch()
    with jobs.trainer(settings, rank, world_size, port) as made:
        weights = jobs.arrays(made.named_weights())
        data = jobs.train_data(rollout, jobs.log_probs(made, rollout))
        try:
            stats = made.step(data)
        except CheckFailed as error:
            return {"failed": error.message}
        return {"weights": weights, "stats": stats, "losses": made.sample_losses()}


def tensors_on_disk(rank: int, world_size: int, port: int, settings: Config, folder: str) -> bool:
    """Gradients written by rank 0, and read back: bitwise those of ``named_gradients``."""
    rollout = jobs.batch()
    with jobs.trainer(settings, rank, world_size, port) as made:
        made.step(jobs.train_data(rollout, jobs.log_probs(made, rollout)))
        whole = jobs.arrays(made.named_gradients())
        if rank:
            for _ in made.named_gradients():
                pass
            return True
        build_manifest(0, "gradients", written(Path(folder), made.named_gradients(), shard_bytes=1 << 14))
        shards = Shards(Path(folder))
        same = all((shards.tensor(name).numpy() == array).all() for name, array in whole.items())
        return same and set(shards.names()) == set(whole)
