"""Every fault of the trainer planted and healed in one live trainer; what was seen comes back as plain data."""

from __future__ import annotations

from typing import Any

import jobs
import numpy as np

from vime.config.schema import Config
from vime.errors import VimeError


def seen(made: Any, folder: str) -> dict[str, Any]:
    """Log-probs twice, weights, one step, saved and loaded: what any fault may change."""
    rollout = jobs.batch()
    found: dict[str, Any] = {"policy": jobs.log_probs(made, rollout), "weights": jobs.arrays(made.named_weights())}
    found |= {"again": jobs.log_probs(made, rollout), "ref": jobs.log_probs(made, rollout, "ref")}
    data = jobs.train_data(rollout, np.zeros(rollout.num_tokens, np.float32))
    try:
        stats = made.step(data)
    except VimeError as error:
        return found | {"failed": error.message}
    found |= {"loss": stats.loss, "grad_norm": stats.grad_norm, "after": jobs.arrays(made.named_weights())}
    made.save(folder, {})
    made.load(folder)
    return found | {"ref after": jobs.log_probs(made, rollout, "ref")}


def all_faults(
    rank: int, world_size: int, port: int, settings: Config, names: list[str], folder: str, copy: str
) -> dict[str, Any]:
    """By fault, (what was said, what was seen); "start" before any, "healed" by fault after each."""
    with jobs.trainer(settings, rank, world_size, port) as made:
        found: dict[str, Any] = {"start": seen(made, f"{folder}/start")}
        for name in names:
            made.heal()
            try:
                said = made.plant(name)
            except VimeError as error:
                found[name] = (error.message, None)
                continue
            found[name] = (said, seen(made, f"{folder}/{name}"))
            made.heal()
            found[f"healed {name}"] = seen(made, f"{folder}/{name}-healed")
        made.restart(copy)
        found["copy"] = jobs.arrays(made.named_weights())
        path = made.config.model.path
        made.heal()
        found["healed copy"] = seen(made, f"{folder}/copy-healed")
        assert (path, made.config) == (copy, settings)
        return found
