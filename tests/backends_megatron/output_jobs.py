"""Jobs of the tests of module outputs, on real trainer processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jobs
import numpy as np

from vime.config.schema import Config
from vime.errors import UsageError


def around(
    rank: int, world_size: int, port: int, settings: Config, ids: np.ndarray, points: Sequence[str]
) -> tuple[dict[str, np.ndarray] | None, bool, list[str]]:
    """(outputs, whether log-probs before and after are bitwise the same, hooks and wrappers left behind)."""
    rollout = jobs.batch()
    with jobs.trainer(settings, rank, world_size, port) as made:
        before = jobs.log_probs(made, rollout)
        hooks = _hooks(made)
        found = made.outputs(ids, points)
        is_same = np.array_equal(before, jobs.log_probs(made, rollout))
        return found, is_same, [name for name in _hooks(made) if name not in hooks]


def experts_of(rank: int, world_size: int, port: int, settings: Config, fault: str | None = None) -> Any:
    """The routing of a batch, or the message of the refusal."""
    with jobs.trainer(settings, rank, world_size, port) as made:
        if fault is not None:
            made.plant(fault)
        try:
            return made.routing(jobs.batch())
        except UsageError as error:
            return error.message


def _hooks(made: Any) -> list[str]:
    found = []
    for module in made.policy.modules:
        for name, part in module.named_modules():
            found += [f"{name} hook {key}" for key in (*part._forward_hooks, *part._forward_pre_hooks)]
            found += [f"{name}.{own}" for own in vars(part) if own in ("get_query_key_value_tensors", "gating")]
    return found


def noise(rank: int, world_size: int, port: int, settings: Config, ids: np.ndarray) -> tuple[str, Any, bool]:
    """(what was planted, where two forwards part at a tolerance of 0, whether they agree once healed)."""
    from vime.align.bisect import Side, bisect
    from vime.types import WeightManifest

    with jobs.trainer(settings, rank, world_size, port) as made:
        sides = [Side(name, made.outputs, lambda: WeightManifest(0, "", {})) for name in ("once", "again")]
        said = made.plant("noisy-kernel")
        found = bisect(*sides, ids, made.spec.num_layers, False, 0.0)
        made.heal()
        return said, found, bisect(*sides, ids, made.spec.num_layers, False, 0.0).first is None
