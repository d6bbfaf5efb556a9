"""Control of a live engine: pause and abort, sleep and wake, faults planted and healed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vime.backends.vllm import walk_faults
from vime.backends.vllm.held import HeldWeights
from vime.backends.vllm.sampling import with_changes
from vime.errors import UsageError, VimeError


class EngineControl(HeldWeights):
    """The part of an engine that stops it, changes its state, and lets it go on."""

    async def pause(self) -> None:
        """Stop scheduling and drop every cached key and value; running requests are kept and go on after resume."""
        llm = self._require_started()
        clears = walk_faults.KEEPS_CACHE not in self._planted
        await self._limited(llm.pause_generation(mode="keep", clear_cache=clears), "pause")

    async def resume(self) -> None:
        """Go on with the requests that pause kept. Raises VimeError while the engine holds no complete weights."""
        self._require_weights()
        await self._limited(self._require_started().resume_generation(), "resume")

    async def abort(self) -> int:
        """Abort every running request; their samples return, with the tokens so far, as aborted."""
        llm = self._require_started()
        if not self._running:
            return 0
        was_paused = await self._limited(llm.is_paused(), "abort")
        if not was_paused:  # a paused engine has handed over every token
            await self._limited(llm.pause_generation(mode="keep", clear_cache=False), "abort")
        running = list(self._running)
        await self._limited(llm.abort(running), "abort")
        if not was_paused:
            await self._limited(llm.resume_generation(), "abort")
        return len(running)

    async def prefix_cache(self) -> tuple[int, int]:
        """Prompt tokens of all samples so far, and how many of them were found in the prefix cache."""
        return self._num_prompt_tokens, self._num_cached_tokens

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes; running requests are preempted and computed again."""
        llm = self._require_started()
        await self._limited(llm.reset_prefix_cache(reset_running_requests=True), "prefix cache reset")

    async def sleep(self, level: int = 2) -> None:
        """Free the device's memory. Level 1 keeps the weights aside; level 2 drops them: sync before generating again.

        Nothing may be running. On a GPU this is vLLM's own sleep mode (not run without a GPU).
        """
        if level not in (1, 2):
            raise UsageError(f"sleep level = {level}: must be 1 (weights kept aside) or 2 (weights dropped)")
        llm = self._require_started()
        if self._asleep_at is not None:
            raise VimeError(f"engine {self.index} sleeps already, at level {self._asleep_at}")
        if self._running:
            raise VimeError(
                f"engine {self.index} cannot sleep with {len(self._running)} requests running", "abort them"
            )
        await self.pause()
        version, self.weight_version = self.weight_version, None
        self.no_weights_reason = "it is going to sleep"
        if self.on_cpu:
            await self._rpc("vime_sleep", level)
        else:
            await self._limited(llm.sleep(level=level, mode="keep"), "sleep")
        self._asleep_at = level
        self._version_before_sleep = version if level == 1 else None
        self.no_weights_reason = f"it sleeps at level {level}"

    async def wake(self) -> None:
        """Take the memory back. After level 2 the weights are unset until the next update.

        Raises VimeError naming every buffer (rotary cache, scales) that did not survive: no update carries those.
        """
        if self._asleep_at is None:
            raise VimeError(f"engine {self.index} is awake")
        await self._take_memory_back()
        if walk_faults.LOSES_BUFFER in self._planted:
            await self._rpc("vime_plant_fault", "zero-rotary")
        await self._require_buffers()
        if self._version_before_sleep is not None:
            self.weight_version = self._version_before_sleep
            await self.resume()

    async def _take_memory_back(self) -> None:
        if self.on_cpu:
            await self._rpc("vime_wake")
        else:
            await self._limited(self._require_started().wake_up(), "wake")
        self._asleep_at = None
        self.no_weights_reason = "it slept at level 2, which drops the weights"

    async def plant(self, fault: str) -> str:
        """Plant a fault of ``vime.align.faults`` in this live engine; returns what was changed, in words.

        At the start it comes after buffers were digested, as a loss during the run would.
        """
        said = ""
        if fault in walk_faults.OPTIONS:
            changes = walk_faults.OPTIONS[fault]
            self.sampling = with_changes(self.sampling, changes)
            said = "sampled with " + ", ".join(f"{name} = {value:g}" for name, value in changes.items())
        elif fault == walk_faults.LOSES_BUFFER:
            said = "the rotary cache is zero after the next sleep"
        elif fault == walk_faults.KEEPS_CACHE:
            said = "a weight sync leaves cached keys and values"
        else:
            said = (await self._rpc("vime_plant_fault", fault))[0]
        await self.reset_prefix_cache()
        self._planted.add(fault)
        return said

    async def settings(self) -> list[dict[str, Any]]:
        """Of each worker, what it reads back of its own settings, see ``crash_facts``."""
        return await self._rpc("vime_settings")

    async def write_stacks(self) -> None:
        """From now on a fatal signal writes the Python stacks of the worker that it hits on stderr."""
        await self._rpc("vime_write_stacks")

    async def plant_crash(self, text: str, requests: Sequence[Sequence[Any]], arguments: Mapping[str, Any]) -> str:
        """Plant a crash (``vime.debug.crash.planted``) in every worker; ``requests``: [name, token ids, seed] each."""
        return (await self._rpc("vime_plant_crash", text, list(requests), dict(arguments)))[0]

    async def heal(self) -> None:
        """Undo what was planted, but for weights, which the next update carries."""
        self._planted.clear()
        self.sampling = self.config.rollout.sampling
        if self._asleep_at is not None:
            await self._take_memory_back()
        await self._rpc("vime_heal")
        await self.reset_prefix_cache()
