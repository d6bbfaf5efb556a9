"""Trainer and engines on the same devices: three wrappers around the seams, each freeing one side for the other.

Awake at any time: the engines from a weight sync until the rollout is there, the trainer from then until the next sync.
On CPUs there is no device to free: the engines really drop and regain their weights, the trainer stays where it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vime.cluster.engines import RayEngine
from vime.cluster.trainer import RayTrainer
from vime.config.schema import Config
from vime.errors import OutOfTime
from vime.protocols import Rollouts, WeightTransport
from vime.types import RolloutBatch, StepStats, WeightManifest

GRACE_SECONDS = 120.0
WEIGHTS_KEPT, WEIGHTS_DROPPED = 1, 2  # sleep levels; after the second the next sync carries every weight


@dataclass
class ColocatedRollouts:
    """After each rollout the engines sleep and the trainer returns to the device."""

    inner: Rollouts
    engines: Sequence[RayEngine]
    trainer: RayTrainer

    def produce(self, rollout_id: int) -> RolloutBatch:
        batch = self.inner.produce(rollout_id)
        asyncio.run(_all(self.engines, _limit(self.trainer), "sleep", WEIGHTS_DROPPED))
        self.trainer.onload()
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


@dataclass
class ColocatedTransport:
    """Before each sync the engines wake, after it the trainer leaves the device."""

    inner: WeightTransport
    engines: Sequence[RayEngine]
    trainer: RayTrainer

    def sync(self, version: int) -> WeightManifest:
        asyncio.run(_all(self.engines, _limit(self.trainer), "wake"))
        manifest = self.inner.sync(version)
        self.trainer.offload()
        return manifest


@dataclass
class ColocatedTrainer:
    """Checkpoints and exports are asked for while the engines have the device: they sleep, and keep their weights."""

    inner: RayTrainer
    engines: Sequence[RayEngine]

    def log_probs(self, batch: RolloutBatch, of: str = "policy") -> np.ndarray:
        return self.inner.log_probs(batch, of)

    def step(self, data: Any) -> StepStats:
        return self.inner.step(data)

    def load(self, path: str) -> dict[str, Any]:
        return self.inner.load(path)

    def save(self, path: str, state: dict[str, Any]) -> None:
        self._on_device("save", path, state)

    def export(self, path: str) -> None:
        self._on_device("export", path)

    def _on_device(self, method: str, *args: Any) -> None:
        asyncio.run(_all(self.engines, _limit(self.inner), "sleep", WEIGHTS_KEPT))
        self.inner.onload()
        getattr(self.inner, method)(*args)
        self.inner.offload()
        asyncio.run(_all(self.engines, _limit(self.inner), "wake"))


def begin(engines: Sequence[RayEngine], config: Config) -> None:
    """Engines that are just up leave the device to the trainer, which is built next."""
    asyncio.run(_all(engines, config.weights.timeout_seconds + GRACE_SECONDS, "sleep", WEIGHTS_DROPPED))


def _limit(trainer: RayTrainer) -> float:
    """The engines' own limits, which name what hung, expire first."""
    return trainer.config.weights.timeout_seconds + GRACE_SECONDS


async def _all(engines: Sequence[RayEngine], limit_seconds: float, method: str, *args: Any) -> None:
    """Call every engine at once. Raises OutOfTime if one does not answer in time."""
    calls = asyncio.gather(*(getattr(engine, method)(*args) for engine in engines))
    try:
        await asyncio.wait_for(calls, limit_seconds)
    except TimeoutError as error:
        raise OutOfTime(
            f"colocation: {method} of the engines did not end within {limit_seconds:g} s",
            "raise weights.timeout_seconds if the engines are merely slow",
        ) from error
