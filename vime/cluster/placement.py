"""Which process gets which resources, checked against the cluster before anything waits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from vime.config.schema import Config
from vime.errors import UsageError


@dataclass(frozen=True)
class Placement:
    """Ray options of each trainer rank and each engine, and what to tell the user."""

    trainer_options: dict[str, Any]
    engine_options: dict[str, Any]
    warnings: tuple[str, ...] = ()


def place(config: Config, available: dict[str, float]) -> Placement:
    """Side by side, or colocated on the same devices; on CPU, processes share cores, with a warning.

    Raises UsageError at once, with wanted against available, if the request can never be met.
    """
    trainers = config.parallel.world_size if config.needs_trainer else 0
    engines = config.rollout.num_engines if config.needs_engines else 0
    if available.get("GPU", 0.0) > 0:
        return _place_on_gpus(config, trainers, engines, available)
    return _place_on_cpus(trainers, engines, available.get("CPU", 0.0))


def _place_on_cpus(trainers: int, engines: int, have: float) -> Placement:
    wanted = trainers + engines
    if have <= 0:
        raise UsageError(
            f"placement: {wanted} processes wanted ({trainers} trainer ranks, {engines} engines), no CPU available",
            "end other work on the cluster, or leave cluster.ray_address unset for a private one",
        )
    share = min(1.0, math.floor(have / wanted * 1e4) / 1e4)  # Ray counts in steps of 0.0001
    warnings = (f"{wanted} processes share {have:g} CPU cores",) if share < 1.0 else ()
    return Placement({"num_cpus": share}, {"num_cpus": share}, warnings)


def _place_on_gpus(config: Config, trainers: int, engines: int, available: dict[str, float]) -> Placement:
    """One GPU a trainer rank, ``engine_tp`` GPUs an engine; colocated ones share. Not run without a GPU."""
    tp, have = config.rollout.engine_tp, available.get("GPU", 0.0)
    wanted = max(trainers, engines * tp) if config.cluster.colocate else trainers + engines * tp
    if wanted > have:
        colocated = ", colocated" if config.cluster.colocate else ""
        raise UsageError(
            f"placement: {wanted} GPUs wanted ({trainers} trainer ranks, {engines} engines x tp {tp}{colocated}), "
            f"{have:g} available",
            "lower parallel.* or rollout.num_engines, set cluster.colocate = true, or add nodes",
        )
    share = 0.5 if config.cluster.colocate else 1.0
    return Placement({"num_cpus": 0, "num_gpus": share}, {"num_cpus": 0, "num_gpus": share * tp})
