"""Which process gets which resources, checked against the cluster before anything waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vime import device
from vime.config.schema import Config
from vime.errors import UsageError


@dataclass(frozen=True)
class Placement:
    """Ray options of each trainer rank and each engine, and what to tell the user."""

    trainer_options: dict[str, Any]
    engine_options: dict[str, Any]
    warnings: tuple[str, ...] = ()


def place(config: Config, available: dict[str, float]) -> Placement:
    """Side by side, or colocated on the same devices. On CPU processes share cores, with a warning.

    Raises UsageError at once, with wanted against available, if the request can never be met.
    """
    trainers = config.parallel.world_size if config.needs_trainer else 0
    engines = config.rollout.num_engines if config.needs_engines else 0
    tp = config.rollout.engine_tp
    if device.kind() == "cuda":
        return _place_gpus(config, trainers, engines, tp, available)
    wanted = trainers + engines * tp
    have = available.get("CPU", 0.0)
    if have <= 0:
        raise UsageError(f"placement: {wanted} processes wanted, the cluster has no CPU available ({available})")
    share = min(1.0, have / max(wanted, 1))
    share = int(share * 1e4) / 1e4  # Ray counts in steps of 0.0001
    return Placement({"num_cpus": share}, {"num_cpus": share * tp if share * tp < 1 else max(1, int(share * tp))})


def _place_gpus(config: Config, trainers: int, engines: int, tp: int, available: dict[str, float]) -> Placement:
    """One GPU a trainer rank and tp GPUs an engine; colocated pairs share. Not run without a GPU."""
    have = available.get("GPU", 0.0)
    wanted = max(trainers, engines * tp) if config.cluster.colocate else trainers + engines * tp
    if wanted > have:
        raise UsageError(
            f"placement: {wanted} GPUs wanted ({trainers} trainer ranks, {engines} engines x tp {tp}"
            f"{', colocated' if config.cluster.colocate else ''}), {have:g} available",
            "lower parallel.* or rollout.num_engines, set cluster.colocate = true, or add nodes",
        )
    share = 0.5 if config.cluster.colocate else 1.0
    return Placement({"num_cpus": 0, "num_gpus": share}, {"num_cpus": 0, "num_gpus": share * tp})
