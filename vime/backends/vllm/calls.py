"""What every part of an engine shares: its state, its processes, and calls into its workers, bounded in time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from vime import device
from vime.backends.vllm.environment import EngineEnvironment
from vime.backends.vllm.processes import DeathWatch, ProcessDied
from vime.backends.vllm.sampling import StopIds
from vime.config.schema import Config
from vime.debug.stop.hold import held
from vime.errors import VimeError
from vime.types import TensorEntry

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

CONTROL_SECONDS = 60.0  # longest wait for pause, resume, cache reset: they wait for one forward at most


class EngineCalls:
    """State of one engine, and the calls that reach its processes."""

    def __init__(self, config: Config, engine_index: int) -> None:
        self.config = config
        self.index = engine_index
        self.sampling = config.rollout.sampling
        self.on_cpu = device.kind() == "cpu"
        self.environment = EngineEnvironment(engine_index, self.on_cpu, config.cluster.start_timeout_seconds)
        self.environment.apply()
        self.weight_version: int | None = None
        self.no_weights_reason = "the engine is not started"
        self._llm: AsyncLLM | None = None
        self._watch: DeathWatch | None = None
        self._asleep_at: int | None = None
        self._version_before_sleep: int | None = None
        self._buffers: list[dict[str, str]] = []
        self._tokenizer: Any = None
        self._stop = StopIds({})
        self._specs: dict[str, TensorEntry] = {}
        self.unreadable: dict[str, str] = {}  # Hugging Face name -> why it cannot be read back
        self._running: set[str] = set()
        self._planted: set[str] = set()
        self._counter = itertools.count()
        self._num_prompt_tokens = self._num_cached_tokens = 0
        self._server: Any = None
        self.max_model_len = 0

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        call = self._require_started().collective_rpc(method, args=args)
        try:
            return await self._limited(call, method, self.config.weights.timeout_seconds)
        except VimeError:
            raise
        except Exception as error:  # vLLM sends a worker's exception back as text
            raise VimeError(
                f"engine {self.index}: {method} failed in a worker: {error}", "see its log above"
            ) from error

    async def _limited(self, call: Awaitable[Any], what: str, limit: float = CONTROL_SECONDS) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError

        seconds = held(limit)
        try:
            with self._require_watch().watching():
                return await asyncio.wait_for(call, seconds)
        except (EngineDeadError, ProcessDied) as error:
            if asyncio.iscoroutine(call):
                call.close()  # never awaited where the engine was dead before
            raise self._dead() from error
        except TimeoutError as error:
            raise VimeError(f"engine {self.index}: {what} did not end within {seconds:.0f} s") from error

    def _require_started(self) -> AsyncLLM:
        if self._llm is None:
            raise VimeError(f"engine {self.index} is not running: {self.no_weights_reason}")
        return self._llm

    def _require_watch(self) -> DeathWatch:
        if self._watch is None:
            raise VimeError(f"engine {self.index} is not running: {self.no_weights_reason}")
        return self._watch

    def _require_weights(self) -> None:
        if self.weight_version is None:
            raise VimeError(
                f"engine {self.index} holds no complete weights: {self.no_weights_reason}",
                "sync the weights before generating",
            )

    def _dead(self) -> VimeError:
        pids = self._watch.dead if self._watch is not None else []
        return VimeError(f"engine {self.index} is dead (engine-core process {pids} ended)", "see its log above")
