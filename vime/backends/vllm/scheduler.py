"""A scheduler that hands an answer over once, when it is complete, instead of token by token.

Most of what an engine costs beside the model is packing, sending and unpacking one small message per token and request.
A request that wants its final output only loses nothing by waiting. Used on the CPU platform, where it was measured;
on a GPU vLLM's own asynchronous scheduler is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists


@dataclass
class Held:
    """What one request has produced and not handed over."""

    client: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[LogprobsLists] = field(default_factory=list)
    prefill_stats: Any = None
    num_nans_in_logits: int = 0

    def take(self, output: EngineCoreOutput) -> None:
        self.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            self.log_probs.append(output.new_logprobs)
        self.prefill_stats = self.prefill_stats or output.prefill_stats
        self.num_nans_in_logits = max(self.num_nans_in_logits, output.num_nans_in_logits)

    def put_before(self, output: EngineCoreOutput) -> None:
        """Let ``output`` carry what was held, before its own tokens."""
        output.new_token_ids = self.token_ids + output.new_token_ids
        parts = self.log_probs + ([output.new_logprobs] if output.new_logprobs is not None else [])
        if parts:
            output.new_logprobs = LogprobsLists(
                np.concatenate([p.logprob_token_ids for p in parts]),
                np.concatenate([p.logprobs for p in parts]),
                np.concatenate([p.sampled_token_ranks for p in parts]),
            )
        output.prefill_stats = self.prefill_stats or output.prefill_stats
        output.num_nans_in_logits = max(self.num_nans_in_logits, output.num_nans_in_logits)


class WholeAnswerScheduler(Scheduler):
    """Holds tokens until the answer is complete, or the engine is paused: weights never change under held tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, Held] = {}

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        by_client = super().update_from_output(*args, **kwargs)
        for client, outputs in by_client.items():
            outputs.outputs = [o for o in outputs.outputs if not self._hold(client, o)]
        if self._is_paused:
            self._release_all(by_client)
        return {client: o for client, o in by_client.items() if not _is_empty(o)}

    def has_requests(self) -> bool:
        """A paused scheduler is stepped once more, without work, to hand over what it holds."""
        return super().has_requests() or (self._is_paused and bool(self._held))

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Any]:
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._held.pop(request.request_id, None)
        return finished

    @property
    def _is_paused(self) -> bool:
        return self.pause_state.value != 0

    def _hold(self, client: int, output: EngineCoreOutput) -> bool:
        """Keep this output back, or complete it with what was kept back before."""
        if self._may_wait(output):
            self._held.setdefault(output.request_id, Held(client)).take(output)
            return True
        held = self._held.pop(output.request_id, None)
        if held is not None:
            held.put_before(output)
        return False

    def _may_wait(self, output: EngineCoreOutput) -> bool:
        request = self.requests.get(output.request_id)
        return (
            request is not None
            and request.sampling_params is not None
            and request.sampling_params.output_kind == RequestOutputKind.FINAL_ONLY
            and output.finish_reason is None
            and output.pooling_output is None
            and output.new_prompt_logprobs_tensors is None
            and output.prompt_token_id_logprobs is None
            and output.new_sampling_mask is None
            and output.routed_experts is None
            and output.events is None
            and output.kv_transfer_params is None
            and output.ec_transfer_params is None
        )

    def _release_all(self, by_client: dict[int, EngineCoreOutputs]) -> None:
        for request_id, held in self._held.items():
            output = EngineCoreOutput(request_id, [])
            held.put_before(output)
            by_client.setdefault(held.client, EngineCoreOutputs()).outputs.append(output)
        self._held.clear()


def _is_empty(outputs: EngineCoreOutputs) -> bool:
    return not outputs.outputs and not outputs.finished_requests and outputs.scheduler_stats is None
