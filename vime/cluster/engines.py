"""Rollout engines as Ray actors, each seen by the driver as an asynchronous ``RolloutEngine``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vime.align.bench import Routing
from vime.cluster.session import RaySession
from vime.cluster.waiting import explain, gather
from vime.config.schema import Config
from vime.debug.everywhere import this_node
from vime.debug.processes import Member
from vime.debug.stop.identity import introduce
from vime.log import answer_stack_requests
from vime.reward.breakpoints import ignore_in_worker
from vime.types import Prompt, RolloutBatch, Sample, TensorEntry, WeightManifest

CONCURRENT = {"max_concurrency": 10_000}  # requests in flight per engine; the engine itself queues


class EngineActor:
    """One engine in its own process. The backend is imported here, so the driver never loads vLLM."""

    def __init__(self, config: Config, index: int) -> None:
        introduce("engine", index)
        ignore_in_worker()
        answer_stack_requests()
        self.index = index
        from vime.backends.vllm.engine import VllmEngine

        self.engine = VllmEngine(config, index)

    async def who(self) -> Member:
        """This process; the engine's own are below it."""
        return Member.here("engine", self.index, node=this_node())

    async def call(self, method: str, *args: Any) -> Any:
        return await getattr(self.engine, method)(*args)


class RayEngine:
    """``protocols.RolloutEngine`` on a remote actor; a death is reported as VimeError that names the engine."""

    def __init__(self, actor: Any, index: int) -> None:
        self.actor, self.index = actor, index
        self.name = f"engine {index}"
        self.tokenizer: Any = None  # the policy's, for user functions, once the driver has read it

    async def _call(self, method: str, *args: Any) -> Any:
        import ray

        try:
            return await self.actor.call.remote(method, *args)
        except ray.exceptions.RayError as error:
            raise explain(self.name, error, method) from error

    async def generate(
        self, prompt: Prompt, seeds: Sequence[int], sampling: Mapping[str, Any] | None = None
    ) -> list[Sample]:
        return await self._call("generate", prompt, list(seeds), sampling)

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 [L] log-probs at temperature 1 by a fresh forward; index 0 holds 0.0."""
        return await self._call("score", token_ids)

    async def describe(self) -> dict[str, Any]:
        return await self._call("describe")

    async def outputs(self, token_ids: np.ndarray, points: Sequence[str]) -> dict[str, np.ndarray]:
        return await self._call("outputs", token_ids, list(points))

    async def routing(self, batch: RolloutBatch) -> Routing:
        return await self._call("routing", batch)

    async def plant(self, fault: str) -> str:
        return await self._call("plant", fault)

    async def heal(self) -> None:
        await self._call("heal")

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def abort(self) -> int:
        return await self._call("abort")

    async def prefix_cache(self) -> tuple[int, int]:
        return await self._call("prefix_cache")

    async def reset_prefix_cache(self) -> None:
        await self._call("reset_prefix_cache")

    async def held(self) -> WeightManifest:
        return await self._call("held")

    async def weight_specs(self) -> list[TensorEntry]:
        return await self._call("weight_specs")

    async def update_weights(self, *args: Any) -> tuple[WeightManifest, WeightManifest | None]:
        return await self._call("update_weights", *args)

    async def sleep(self, level: int = 2) -> None:
        await self._call("sleep", level)

    async def wake(self) -> None:
        await self._call("wake")

    async def memory(self) -> dict[str, int]:
        return await self._call("memory")


class RayEngines:
    """All engines of a run."""

    def __init__(self, config: Config, session: RaySession, options: list[dict[str, Any]]) -> None:
        self.config = config
        self._session = session
        self.engines = [
            RayEngine(session.start_actor(EngineActor, f"engine {i}", own | CONCURRENT, config, i), i)
            for i, own in enumerate(options)
        ]

    def begin(self, record_loading: dict[str, Any] | None = None) -> None:
        """Let every engine come up; ``wait`` for them before use. ``record_loading``: see the first's ``start``."""
        self._who = {e.name: e.actor.who.remote() for e in self.engines}
        recorded = [record_loading, *[None] * (len(self.engines) - 1)]
        starts = zip(self.engines, recorded, strict=True)
        self._starting = {e.name: e.actor.call.remote("start", order) for e, order in starts}

    def wait(self) -> list[dict[str, Any]]:
        """The engines' descriptions, in order, once all are up. Raises VimeError with the first cause."""
        limit, began = self.config.cluster.start_timeout_seconds, time.monotonic()
        self._session.introduce(gather(self._who, limit, "starting the engines").values())
        infos = gather(self._starting, max(1.0, began + limit - time.monotonic()), "starting the engines")
        for info in infos.values():
            self._session.watch(info["pids"])
        return [infos[e.name] for e in self.engines]

    def serve_openai(self) -> list[str]:
        """Serve every engine's OpenAI-compatible endpoint; returns the URLs in order."""
        refs = {e.name: e.actor.call.remote("serve_openai") for e in self.engines}
        urls = gather(refs, self.config.cluster.start_timeout_seconds, "serving the OpenAI API")
        return [urls[e.name] for e in self.engines]

    def ping(self, limit: float) -> None:
        """Raises VimeError where an engine is dead or does not answer within ``limit`` seconds."""
        gather({e.name: e.actor.call.remote("check_health") for e in self.engines}, limit, "a sign of life")

    def held(self) -> dict[str, WeightManifest]:
        """By engine, the digests of the weights that it holds. UsageError where no worker holds whole tensors."""
        return self._ask("held", "reading back the weights")

    def changed_buffers(self) -> dict[str, list[list[str]]]:
        """By engine and rank, the buffers that are not what they were when it started."""
        return self._ask("changed_buffers", "reading back the buffers")

    def _ask(self, method: str, what: str) -> dict[str, Any]:
        refs = {e.name: e.actor.call.remote(method) for e in self.engines}
        return gather(refs, self.config.weights.timeout_seconds, what)

    def first(self, method: str, *args: Any, what: str) -> Any:
        """What the first engine answers to ``method``."""
        engine = self.engines[0]
        refs = {engine.name: engine.actor.call.remote(method, *args)}
        return gather(refs, self.config.weights.timeout_seconds, what)[engine.name]

    def shutdown(self, timeout_seconds: float = 10.0) -> None:
        """End the engines in order, so that they leave nothing behind; the session ends what does not answer."""
        gather({e.name: e.actor.call.remote("shutdown") for e in self.engines}, timeout_seconds, "ending the engines")
