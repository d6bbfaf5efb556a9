"""The trainer and the engines of a bench, as the checks of ``vime align-check`` see them (``vime.align.bench``)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vime.align.bench import AS_THE_RUN, Forward, LoadedParameter, Routing, Unavailable
from vime.cluster.engines import RayEngine, RayEngines
from vime.cluster.trainer import RayTrainer
from vime.config.schema import Config
from vime.errors import OutOfTime, UsageError, VimeError
from vime.log import Progress
from vime.types import Prompt, RolloutBatch, Sample, StepStats, TrainData, WeightManifest
from vime.weights.transport import ShmTransport

HEALTH_SECONDS = 20.0
GRACE_SECONDS = 60.0
"""Limits of the parts themselves expire first: they name what hung."""
WEIGHTS_KEPT = 1  # sleep level
Answer = TypeVar("Answer")


@dataclass
class Life:
    """Whether one side still answers. Once it does not, whatever rests on it is NOT TESTED.

    check  asks for the check that runs at this moment
    ping   raises VimeError where the side is gone
    """

    name: str
    check: Callable[[], str]
    ping: Callable[[], None]
    end: str = ""

    @contextmanager
    def required(self) -> Iterator[None]:
        """Around every call. Raises Unavailable where an earlier check met the end of this side."""
        if self.end:
            raise Unavailable(self.end)
        try:
            yield
        except VimeError as error:
            if not isinstance(error, Unavailable):
                self._examine(error)
            raise

    def _examine(self, error: VimeError) -> None:
        try:
            self.ping()
        except VimeError:
            self.end = f"{self.name} ended in check {self.check()}: {error.message.splitlines()[0]}"


@contextmanager
def ending(life: Life, say: Progress) -> Iterator[ExitStack]:
    """The stack of what ends a side. Of a side whose end a check has met, it is no failure that it cannot be ended."""
    with ExitStack() as stack:
        yield stack
        ends = stack.pop_all()
    try:
        ends.close()
    except VimeError as error:
        if not life.end:
            raise
        say.warn(f"{life.end}; {error.message.splitlines()[0]}")


@dataclass
class Devices:
    """Who has the devices, where trainer and engines share them (``cluster.colocate``); else each has its own."""

    is_shared: bool
    trainer: RayTrainer | None = None
    engines: RayEngines | None = None
    is_trainer_on: bool = True
    is_engine_awake: bool = True

    def to_trainer(self) -> None:
        """The engines sleep, and keep their weights; the trainer is on its device."""
        if self.is_shared and self.engines is not None and self.is_engine_awake:
            self.sleep(WEIGHTS_KEPT)
        self._onload()

    def to_engines(self) -> None:
        if self.is_shared and self.trainer is not None and self.is_trainer_on:
            self.trainer.offload()
            self.is_trainer_on = False
        if not self.is_engine_awake:
            self.wake()

    def to_both(self) -> None:
        """For a sync, as in a colocated run."""
        self._onload()
        if not self.is_engine_awake:
            self.wake()

    def sleep(self, level: int) -> None:
        assert self.engines is not None
        ask_all(self.engines, "sleep", level)
        self.is_engine_awake = False

    def wake(self) -> None:
        assert self.engines is not None
        self.is_engine_awake = True  # also where it then says that a buffer was lost
        ask_all(self.engines, "wake")

    def _onload(self) -> None:
        if self.trainer is not None and not self.is_trainer_on:
            self.trainer.onload()
            self.is_trainer_on = True


def ask_all(engines: RayEngines, method: str, *args: Any) -> dict[str, Any]:
    """The answers of all engines, by name. Raises OutOfTime where one does not answer."""
    limit = engines.config.weights.timeout_seconds + GRACE_SECONDS

    async def ask() -> list[Any]:
        return await asyncio.gather(*(getattr(engine, method)(*args) for engine in engines.engines))

    answers = run(ask(), limit, f"{method} of the engines")
    return {engine.name: answer for engine, answer in zip(engines.engines, answers, strict=True)}


def run(call: Awaitable[Answer], limit: float, what: str) -> Answer:
    """Await outside of an event loop. Raises OutOfTime after ``limit`` seconds."""

    async def limited() -> Answer:
        return await asyncio.wait_for(call, limit)

    try:
        return asyncio.run(limited())
    except TimeoutError as error:
        raise OutOfTime(f"{what} did not end within {limit:g} s", "the engine's log may say why") from error


@dataclass
class LiveTrainer:
    """``vime.align.bench.TrainerSide`` over all ranks. ``about``: rank 0's description; ``num_steps``: done so far."""

    ray: RayTrainer
    about: Mapping[str, Any]
    devices: Devices
    life: Life
    num_steps: int = 0

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self.life.required():
            self.devices.to_trainer()
            yield

    def accounting(self) -> Mapping[str, Sequence[str]]:
        return self.about["tensors"]

    def describe(self) -> Mapping[str, Any]:
        return self.about

    def loaded(self) -> list[LoadedParameter]:
        with self._turn():
            return self.ray.loaded()

    def manifest(self) -> WeightManifest:
        return self.write_tensors("weights", None, self.num_steps)

    def write_tensors(self, of: str, folder: Path | None, version: int) -> WeightManifest:
        with self._turn():
            return self.ray.write_tensors(of, folder, version)

    def log_probs(self, batch: RolloutBatch, of: str = "policy", how: Forward = AS_THE_RUN) -> np.ndarray:
        with self._turn():
            return self.ray.log_probs(batch, of, how)

    def outputs(self, token_ids: np.ndarray, points: Sequence[str], of: str = "policy") -> Mapping[str, np.ndarray]:
        with self._turn():
            return self.ray.outputs(token_ids, points, of)

    def routing(self, batch: RolloutBatch) -> Routing:
        with self._turn():
            return self.ray.routing(batch)

    def step(self, data: TrainData) -> StepStats:
        with self._turn():
            stats = self.ray.step(data)
        self.num_steps += 1
        return stats

    def sample_losses(self) -> Mapping[str, tuple[float, int, int]]:
        with self._turn():
            return self.ray.sample_losses()

    def memory(self) -> Mapping[str, Mapping[str, int]]:
        with self.life.required():
            return self.ray.memory()

    def save(self, path: str, state: dict[str, Any]) -> None:
        with self._turn():
            self.ray.save(path, state)

    def load(self, path: str) -> dict[str, Any]:
        with self._turn():
            return self.ray.load(path)

    def plant(self, fault: str) -> str:
        with self._turn():
            return self.ray.plant(fault)

    def heal(self) -> None:
        with self._turn():
            self.ray.heal()
        self.num_steps = 0

    def restart(self, path: str) -> None:
        """As started from the folder ``path``, until ``heal``."""
        with self._turn():
            self.ray.restart(path)
        self.num_steps = 0


@dataclass
class LiveEngine:
    """``vime.align.bench.EngineSide`` over all engines. ``transport``: where the last sync's answers are."""

    config: Config
    ray: RayEngines
    devices: Devices
    life: Life
    transport: ShmTransport | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> RayEngine:
        return self.ray.engines[0]

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Around everything that needs awake engines."""
        with self.life.required():
            self.devices.to_engines()
            yield

    def _ask_first(self, method: str, *args: Any) -> Any:
        limit = self.config.weights.timeout_seconds + GRACE_SECONDS
        with self.turn():
            return run(getattr(self.first, method)(*args), limit, f"{method} of {self.first.name}")

    def generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[Sequence[int]], sampling: Mapping[str, Any] | None = None
    ) -> list[list[Sample]]:
        async def all_of_them() -> list[list[Sample]]:
            asked = zip(prompts, seeds, strict=True)
            return await asyncio.gather(*(self.first.generate(prompt, own, sampling) for prompt, own in asked))

        with self.turn():
            return run(all_of_them(), self.config.rollout.timeout_seconds, f"generation of {self.first.name}")

    def score(self, sequences: Sequence[np.ndarray], at_once: int | None = None) -> list[np.ndarray]:
        async def all_of_them() -> list[np.ndarray]:
            free = asyncio.Semaphore(at_once or max(len(sequences), 1))

            async def one(token_ids: np.ndarray) -> np.ndarray:
                async with free:
                    return await self.first.score(token_ids)

            return await asyncio.gather(*(one(token_ids) for token_ids in sequences))

        with self.turn():
            return run(all_of_them(), self.config.rollout.timeout_seconds, f"scoring of {self.first.name}")

    def manifest(self, view: str) -> WeightManifest:
        if view == "engine-held":
            return self._ask_first("held")
        if view != "engine-received":
            raise UsageError(f"{view!r} is no view of an engine", "engine-received, engine-held")
        return self.manifests()[self.first.name][0]

    def held(self) -> Mapping[str, WeightManifest]:
        with self.turn():
            return ask_all(self.ray, "held")

    def manifests(self) -> Mapping[str, tuple[WeightManifest, WeightManifest | None]]:
        if self.transport is None or not self.transport.answers:
            raise Unavailable("no engine has received weights from the trainer")
        return self.transport.answers

    def changed_buffers(self) -> Mapping[str, list[list[str]]]:
        with self.turn():
            return self.ray.changed_buffers()

    def sleep(self, level: int) -> None:
        with self.turn():
            self.devices.sleep(level)

    def wake(self) -> None:
        with self.turn():  # which wakes them
            return

    def prefix_cache(self) -> tuple[int, int]:
        return self._ask_first("prefix_cache")

    def reset_prefix_cache(self) -> None:
        self._ask_first("reset_prefix_cache")

    def outputs(self, token_ids: np.ndarray, points: Sequence[str]) -> Mapping[str, np.ndarray]:
        return self._ask_first("outputs", token_ids, points)

    def routing(self, batch: RolloutBatch) -> Routing:
        return self._ask_first("routing", batch)

    def memory(self) -> Mapping[str, Mapping[str, int]]:
        with self.life.required():
            return ask_all(self.ray, "memory")

    def describe(self) -> Mapping[str, Any]:
        return {**self.about, **self._ask_first("describe")}

    def plant(self, fault: str) -> str:
        with self.turn():
            return next(iter(ask_all(self.ray, "plant", fault).values()))

    def heal(self) -> None:
        with self.turn():
            ask_all(self.ray, "heal")
