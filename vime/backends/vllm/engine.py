"""One vLLM engine: token ids in, samples out, and weights swapped as a transaction. No Ray in here."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vime import device
from vime.align.bench import Routing
from vime.align.faults import is_in_engine
from vime.backends.vllm import walk_faults
from vime.backends.vllm.answers import STATUS, make_sample, response_arrays
from vime.backends.vllm.arguments import engine_arguments
from vime.backends.vllm.control import EngineControl
from vime.backends.vllm.processes import DeathWatch, ProcessDied
from vime.backends.vllm.requests import all_or_none, options_within
from vime.backends.vllm.sampling import (
    collect_stop_ids,
    effective_options,
    generation_config_warnings,
    with_changes,
)
from vime.backends.vllm.update import WeightUpdate, check_update
from vime.debug.stop.identity import children_are
from vime.errors import PromptTooLong, UsageError, VimeError
from vime.forks import forking_dies_with_parent
from vime.types import Prompt, RolloutBatch, Sample, TensorEntry, WeightManifest

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams

SHUTDOWN_SECONDS = 2.0


class VllmEngine(EngineControl):
    """Implements ``protocols.RolloutEngine`` and what weight sync needs. All methods may be called at any time."""

    # ---- life ----------------------------------------------------------------------------------------------------

    async def start(self, record_loading: dict[str, Any] | None = None) -> dict[str, Any]:
        """Start the engine's processes and load the checkpoint as weight version 0.

        ``record_loading``: a ``dumping.Order`` for what this first load reads, see ``recorded_loading``.
        Returns stop ids with origins, effective sampling options with origins, warnings, versions, lengths and pids.
        Raises UsageError for settings vLLM refuses, VimeError if the engine does not come up.
        """
        import vllm

        arguments = engine_arguments(self.config, self.on_cpu)
        unknown = sorted(set(arguments) - set(vllm.AsyncEngineArgs.__dataclass_fields__))
        if unknown:
            raise UsageError(f"vllm.{unknown[0]} is not an argument of vLLM {vllm.__version__} (AsyncEngineArgs)")
        vllm_config = vllm.AsyncEngineArgs(**arguments).create_engine_config()
        logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"))
        if record_loading is not None:
            from vime.backends.vllm.dumping import record_first_load

            record_first_load()  # what is forked inherits it; what is spawned finds the order in its environment
        core = children_are("engine core", self.index)
        with forking_dies_with_parent(), self.environment.recording(record_loading), core:
            self._llm = vllm.AsyncLLMEngine.from_vllm_config(vllm_config, disable_log_stats=True)
        self._watch = DeathWatch(self.pids)
        self.max_model_len = vllm_config.model_config.max_model_len
        self._tokenizer = self._llm.get_tokenizer()
        self._stop = collect_stop_ids(
            self.config.model.path, self._tokenizer.eos_token_id, self.sampling.stop_token_ids
        )
        await self._check_parameters()
        self._specs = await self._trace()
        self._buffers = await self._rpc("vime_buffers")
        planted = [
            f"engine {self.index}: PLANTED FAULT {name} (debug.inject): {await self.plant(name)}"
            for name in self.config.debug.inject
            if is_in_engine(name)
        ]
        await self._llm.update_weight_version("0")
        self.weight_version = 0
        return self._info(vllm.__version__, vllm_config, planted)

    def _info(self, vllm_version: str, vllm_config: Any, planted: list[str]) -> dict[str, Any]:
        options, origins = effective_options(self.sampling, self._stop)
        return {
            "engine": self.index,
            "stop_token_ids": options["stop_token_ids"],
            "stop_origins": {i: list(o) for i, o in self._stop.origins.items()},
            "sampling": options,
            "sampling_origin": origins,
            "warnings": [*planted, *generation_config_warnings(self.config.model.path, self.sampling)],
            "vllm_version": vllm_version,
            "max_model_len": self.max_model_len,
            "kv_tokens": vllm_config.cache_config.num_gpu_blocks * vllm_config.cache_config.block_size,
            "pids": self.pids,
        }

    async def describe(self) -> dict[str, Any]:
        """What is in effect now, read from the live engine rather than from the configuration.

        sampling, sampling_origin   every option of the next request, under our names, and where it comes from
        log_probs_mode              vLLM's name of what it reports: processed_logprobs, raw_logprobs
        dtype, head_dtype, logits_dtype, log_softmax_dtype   of weights and of the last steps of the computation
        prefix_caching, block_size, max_model_len            block_size: tokens per block of the cache
        """
        import vllm

        options, origins = effective_options(self.sampling, self._stop)
        found = self._require_started().vllm_config
        facts = (await self._rpc("vime_facts"))[0]
        return {
            **facts,
            "sampling": options,
            "sampling_origin": origins,
            "log_softmax_dtype": "float32",  # the sampler's own, whatever the logits are
            "prefix_caching": bool(found.cache_config.enable_prefix_caching),
            "block_size": found.cache_config.block_size,
            "max_model_len": self.max_model_len,
            "vllm_version": vllm.__version__,
        }

    async def memory(self) -> dict[str, int]:
        """Bytes by kind, summed over this process and the engine's workers, see ``device.memory``."""
        total = device.memory()
        for worker in await self._rpc("vime_memory"):
            total = {kind: total.get(kind, 0) + worker.get(kind, 0) for kind in {**total, **worker}}
        return total

    @property
    def pids(self) -> list[int]:
        """Process ids of the engine-core processes."""
        return [p.pid for p in self.processes if p.pid is not None]

    @property
    def processes(self) -> list[Any]:
        """The engine-core processes, as ``multiprocessing`` knows them: their exit codes outlive them."""
        return list(self._require_started().engine_core.resources.engine_manager.processes)

    async def check_health(self) -> None:
        """Raises VimeError naming the engine if its processes are dead."""
        if self._require_started().errored or self._require_watch().dead:
            raise self._dead()

    async def serve_openai(self) -> str:
        """Serve this engine at the returned URL (loopback, OpenAI-compatible under ``/v1``) until shutdown."""
        from vime.backends.vllm.openai_server import OpenAiServer

        if self._server is None:
            self._server = await OpenAiServer.start(self._require_started(), self.config.model.path)
        return self._server.url

    async def shutdown(self) -> None:
        """End server and engine processes within seconds and remove their temporary files. May be called twice."""
        if self._server is not None:
            await self._server.close()
            self._server = None
        llm, self._llm = self._llm, None
        self.weight_version, self.no_weights_reason = None, "the engine is shut down"
        if llm is not None:
            self._require_watch().close()
            processes = list(llm.engine_core.resources.engine_manager.processes)
            llm.shutdown(timeout=SHUTDOWN_SECONDS)
            for process in processes:
                await asyncio.to_thread(process.join, SHUTDOWN_SECONDS)
                if process.is_alive():
                    process.kill()
                    await asyncio.to_thread(process.join, SHUTDOWN_SECONDS)
        self.environment.close()

    # ---- generation ----------------------------------------------------------------------------------------------

    async def generate(
        self, prompt: Prompt, seeds: Sequence[int], sampling: Mapping[str, Any] | None = None
    ) -> list[Sample]:
        """One sample per seed, in order; one request each, so that samples differ where seeds differ.

        Raises PromptTooLong for this prompt alone, VimeError where the engine holds no complete weights, died, or
        answered without one finite log-prob per token; with ``debug.rollout_only``, where nothing is trained, a sample
        whose log-probs are not finite is FAILED instead.
        """
        self._require_weights()
        options = with_changes(self.sampling, sampling)
        way_out = "raise rollout.max_context_len, or set data.max_prompt_len"
        fixed = options_within(prompt, options, self._stop, self.max_model_len, way_out)
        ids = prompt.token_ids.tolist()
        return await all_or_none([self._one(prompt, ids, fixed, i, seed) for i, seed in enumerate(seeds)])

    async def _one(self, prompt: Prompt, ids: list[int], fixed: dict[str, Any], index: int, seed: int) -> Sample:
        request_id = f"{self.index}-{prompt.group_id}/{index}-{next(self._counter)}"
        output = await self._request(request_id, ids, _params(**fixed, seed=seed))
        if output.num_cached_tokens is not None:  # None: aborted before it ran
            self._num_prompt_tokens += len(ids)
            self._num_cached_tokens += output.num_cached_tokens
        answer = output.outputs[0]
        flat = answer.logprobs
        arrays = response_arrays(
            request_id,
            answer.token_ids,
            None if flat is None else flat.logprobs,
            None if flat is None else flat.token_ids,
            must_be_finite=not self.config.debug.rollout_only,
        )
        text = self._tokenizer.decode(arrays[0].tolist(), skip_special_tokens=True)
        versions = self._versions(answer.weight_versions)
        return make_sample(prompt, index, seed, arrays, STATUS[answer.finish_reason], versions, text)

    async def _request(self, request_id: str, ids: list[int], params: SamplingParams) -> RequestOutput:
        """The final output of one request."""
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        llm = self._require_started()
        self._running.add(request_id)
        output = None
        try:
            with self._require_watch().watching():
                async for answer in llm.generate({"type": "token", "prompt_token_ids": ids}, params, request_id):
                    output = answer
        except (EngineDeadError, EngineGenerateError, ProcessDied) as error:
            raise self._dead() from error
        finally:
            self._running.discard(request_id)
        if output is None:
            raise VimeError(f"engine {self.index}: request {request_id} ended without an answer")
        return output

    def _versions(self, spans: Any) -> tuple[int, int]:
        if not spans:  # no token yet: an aborted request that never ran
            version = self.weight_version if self.weight_version is not None else 0
            return version, version
        numbers = [int(span.version) for span in spans]
        return min(numbers), max(numbers)

    async def score(self, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """float32 [L] log-probs of ``token_ids`` under the current weights at temperature 1; index 0 holds 0.0.

        Computed by a fresh forward (the prefix cache is not read). Raises PromptTooLong if L is over the context.
        """
        self._require_weights()
        ids = [int(t) for t in token_ids]
        if len(ids) > self.max_model_len:
            raise PromptTooLong(f"{len(ids)} tokens to score are over the context of {self.max_model_len}")
        if len(ids) < 2:
            return np.zeros(len(ids), np.float32)
        # All but the last token are the prompt; the last one's log-prob comes with the token generated after them:
        # so a sequence may be as long as the context.
        request_id = f"{self.index}-score-{next(self._counter)}"
        params = _params(
            max_tokens=1,
            temperature=1.0,
            prompt_logprobs=0,
            logprob_token_ids=[ids[-1]],
            flat_logprobs=True,
            detokenize=False,
        )
        output = await self._request(request_id, ids[:-1], params)
        if output.num_cached_tokens:
            raise VimeError(f"engine {self.index}: {output.num_cached_tokens} tokens to score were read from the cache")
        first, last = output.prompt_logprobs, output.outputs[0].logprobs
        values = [*first.logprobs, *last.logprobs[1:]]
        _, log_probs = response_arrays(request_id, ids[1:], values, [*first.token_ids, *last.token_ids[1:]])
        return np.concatenate([np.zeros(1, np.float32), log_probs])

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    async def score_prompt(self, ids: list[int]) -> np.ndarray:
        """float32 [L] as ``score``, finite or not, of one prefill of all of ``ids`` (fewer than the context)."""
        params = _params(max_tokens=1, temperature=1.0, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
        request_id = f"{self.index}-prefill-{next(self._counter)}"
        found = (await self._request(request_id, ids, params)).prompt_logprobs
        _, log_probs = response_arrays(request_id, ids[1:], found.logprobs, found.token_ids, must_be_finite=False)
        return np.concatenate([np.zeros(1, np.float32), log_probs])

    async def outputs(self, token_ids: Sequence[int] | np.ndarray, points: Sequence[str]) -> dict[str, np.ndarray]:
        """float32 [L, width] of the named points (``vime.align.points``) in one prefill; see ``outputs``."""
        from vime.backends.vllm.outputs import engine_outputs

        self._require_weights()
        return await engine_outputs(self, token_ids, points)

    async def routing(self, batch: RolloutBatch) -> Routing:
        """Experts of every token in a prefill of its sample alone. UsageError for a model without experts."""
        from vime.backends.vllm.outputs import engine_routing

        self._require_weights()
        return await engine_routing(self, batch)

    # ---- weights -------------------------------------------------------------------------------------------------

    async def update_weights(
        self,
        version: int,
        path: str,
        tensors: Sequence[tuple[TensorEntry, int]],
        verify: str = "full",
        names: Sequence[str] | None = None,
    ) -> tuple[WeightManifest, WeightManifest | None]:
        """Replace all weights by those in the shared file ``path``; ``tensors``: entry and first byte of each.

        Returns the digests received and (``verify="full"``) those the live parameters hold, of the tensors ``names``
        (None: all; the others' are empty). Before the first byte
        every name, shape and dtype is checked: UsageError lists what is wrong and the engine goes on with the old
        weights. Where an entry has a digest, both sides must equal it; otherwise, or on an error on the way, the engine
        holds no complete weights and generates nothing until an update succeeds.
        """
        llm = self._require_started()
        if self._asleep_at is not None:
            raise VimeError(f"engine {self.index} sleeps; wake it before updating its weights")
        check_update(self.index, self._specs, tensors, path)
        await self.pause()
        self.weight_version = None
        self.no_weights_reason = f"the update to version {version} is not complete"
        update = WeightUpdate(llm, version, path, tensors, self.config.rollout.engine_tp, names, self.unreadable)
        try:
            seconds = self.config.weights.timeout_seconds
            received, held = await self._limited(update.run(verify), "weight update", seconds)
            await self._require_buffers()
        except Exception as error:
            self.no_weights_reason = f"the update to version {version} failed: {type(error).__name__}: {error}"
            await self._abort_after_failure()
            raise VimeError(f"engine {self.index} holds no complete weights: {self.no_weights_reason}") from error
        wrong = update.differences(received, held)
        if wrong:
            self.no_weights_reason = f"version {version} is not what was sent: " + "; ".join(wrong[:5])
            await self._abort_after_failure()
            return received, held
        self.weight_version = version
        if walk_faults.KEEPS_CACHE not in self._planted:
            await self.reset_prefix_cache()
        await self.resume()
        return received, held

    async def _abort_after_failure(self) -> None:
        if self._llm is not None and not self._llm.errored:
            await self.abort()


def _params(**options: Any) -> SamplingParams:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(**options, output_kind=RequestOutputKind.FINAL_ONLY, skip_clone=True)
