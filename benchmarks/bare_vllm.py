"""The baseline of ``rollout``: vLLM's own offline interface, without vime's plugin."""

from __future__ import annotations

import time
from collections.abc import Sequence

from vime.backends.vllm.arguments import engine_arguments
from vime.backends.vllm.environment import ALWAYS, ON_CPU
from vime.backends.vllm.sampling import StopIds, request_options
from vime.config.schema import Config

VIMES_OWN = ("worker_extension_cls", "weight_transfer_config")
"""Engine arguments that have no meaning without vime."""

_PROCESSES = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VIME_FORK_ENGINE")
ENVIRONMENT = ALWAYS | {k: v for k, v in ON_CPU.items() if k not in _PROCESSES} | {"VLLM_PLUGINS": ""}
"""Threads and binding as vime sets them; the layout of processes is vLLM's default: an engine process of its own."""


class BareEngine:
    """``vllm.LLM`` with the engine arguments of ``config``."""

    def __init__(self, config: Config) -> None:
        import vllm

        arguments = {k: v for k, v in engine_arguments(config, on_cpu=True).items() if k not in VIMES_OWN}
        self._llm = vllm.LLM(**arguments)
        self._options = request_options(config.rollout.sampling, StopIds({}))
        self._options["max_tokens"] = config.rollout.sampling.max_response_len

    def generate(self, requests: Sequence[tuple[list[int], int]]) -> tuple[int, float, list[list[int]]]:
        """(response tokens, seconds, token ids of each response) of all requests at once."""
        from vllm import SamplingParams

        start = time.perf_counter()
        outputs = self._llm.generate(
            [{"prompt_token_ids": ids} for ids, _ in requests],
            [SamplingParams(**self._options, seed=seed) for _, seed in requests],
            use_tqdm=False,
        )
        seconds = time.perf_counter() - start
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        return sum(map(len, answers)), seconds, answers

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
