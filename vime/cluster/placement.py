"""Which process gets which resources, checked against the cluster before anything waits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from vime.config.schema import Config
from vime.errors import UsageError


@dataclass(frozen=True)
class Placement:
    """Ray options of each trainer rank and each engine, in order, and what to tell the user."""

    trainer_options: list[dict[str, Any]]
    engine_options: list[dict[str, Any]]
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
    return Placement([{"num_cpus": share}] * trainers, [{"num_cpus": share}] * engines, warnings)


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
    if config.cluster.colocate and trainers and engines:
        return _pairs(config, trainers, engines, wanted)
    return Placement([{"num_cpus": 0, "num_gpus": 1}] * trainers, [{"num_cpus": 0, "num_gpus": tp}] * engines)


def _pairs(config: Config, trainers: int, engines: int, num_gpus: int) -> Placement:
    """Trainer rank i and engine i share GPU i: one bundle of a placement group. Not run without a GPU."""
    if config.rollout.engine_tp > 1:
        raise UsageError(
            f"rollout.engine_tp = {config.rollout.engine_tp}: colocated engines hold one GPU each",
            "set rollout.engine_tp = 1, or cluster.colocate = false",
        )
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.placement_group([{"GPU": 1}] * num_gpus)
    if not group.wait(config.cluster.start_timeout_seconds):
        raise UsageError(f"placement: {num_gpus} GPUs were not free within {config.cluster.start_timeout_seconds:g} s")

    def options(count: int) -> list[dict[str, Any]]:
        strategies = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i) for i in range(count)]
        return [{"num_cpus": 0, "num_gpus": 0.5, "scheduling_strategy": strategy} for strategy in strategies]

    return Placement(options(trainers), options(engines))
