"""The two sides of ``trainer``, each in a process of its own. Axes: B sequences, T positions of a row, V vocabulary."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vime.algo.loss import policy_loss
from vime.config.schema import Config
from vime.train.packing import pack, plan_micro_batches
from vime.types import TrainBatch, TrainData


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward + backward. ``num_positions``: tokens and padding that went through the model."""

    seconds: float
    grad_norm: float
    num_positions: int


class Megatron:
    """vime's trainer, one rank."""

    def __init__(self, config: Config) -> None:
        from vime.backends.megatron.rank import MegatronRank

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._rank = MegatronRank(config, 0, 1, "127.0.0.1", port)

    def forward_backward(self, data: TrainData) -> Pass:
        from vime.backends.megatron.step import _forward_backward

        start = time.perf_counter()
        _forward_backward(self._rank.learner, data)
        seconds = time.perf_counter() - start
        # The gradient may lie in float32 beside the parameter; its norm is compared, not timed.
        norms = [float(g.double().norm()) for _, g in self._rank.named_gradients()]
        return Pass(seconds, math.hypot(*norms), len(data.token_ids_T))

    def close(self) -> None:
        self._rank.close()


class Transformers:
    """``AutoModelForCausalLM`` with torch SDPA, the same loss."""

    def __init__(self, config: Config) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._config = config
        self._model = AutoModelForCausalLM.from_pretrained(
            config.model.path, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        ).train()

    def forward_backward(self, data: TrainData, layout: str) -> Pass:
        """``layout``: padded or packed."""
        start = time.perf_counter()
        self._model.zero_grad()
        num_positions = 0
        for batch in self._micro_batches(data, layout):
            log_probs_T, positions = (self._padded if layout == "padded" else self._packed)(batch)
            num_positions += positions
            old_T, advantages_T, weight_T = map(
                torch.from_numpy, (batch.old_log_probs_T, batch.advantages_T, batch.loss_weight_T)
            )
            loss_T, _ = policy_loss(self._config.algo, log_probs_T, old_T, advantages_T)
            ((weight_T * loss_T).sum() / data.normalizer).backward()
        seconds = time.perf_counter() - start
        norms = [float(p.grad.double().norm()) for p in self._model.parameters() if p.grad is not None]
        return Pass(seconds, math.hypot(*norms), num_positions)

    def _micro_batches(self, data: TrainData, layout: str) -> Iterator[TrainBatch]:
        """At most ``train.max_tokens_per_micro_batch`` positions each, padding included."""
        budget = self._config.train.max_tokens_per_micro_batch
        if layout == "packed":
            yield from (pack(data, rows) for rows in plan_micro_batches(data.lengths_N, 1, budget)[0])
            return
        rows: list[int] = []
        for row in range(len(data.lengths_N)):
            if rows and int(data.lengths_N[[*rows, row]].max()) * (len(rows) + 1) > budget:
                yield pack(data, np.array(rows))
                rows = []
            rows.append(row)
        yield pack(data, np.array(rows))

    def _padded(self, batch: TrainBatch) -> tuple[Tensor, int]:
        lengths = np.diff(batch.cu_seqlens)
        is_token = np.arange(lengths.max()) < lengths[:, None]
        tokens = np.zeros(is_token.shape, np.int64)
        tokens[is_token] = batch.tokens_T
        tokens_BT, is_token_BT = torch.from_numpy(tokens), torch.from_numpy(is_token)
        logits_BTV = self._model(input_ids=tokens_BT, attention_mask=is_token_BT.long(), use_cache=False).logits
        return _log_probs(logits_BTV, tokens_BT)[is_token_BT], tokens_BT.numel()

    def _packed(self, batch: TrainBatch) -> tuple[Tensor, int]:
        lengths = np.diff(batch.cu_seqlens)
        within = np.arange(len(batch.tokens_T)) - np.repeat(batch.cu_seqlens[:-1], lengths)
        tokens_BT, position_ids = torch.from_numpy(batch.tokens_T)[None], torch.from_numpy(within)[None]
        logits_BTV = self._model(input_ids=tokens_BT, position_ids=position_ids, use_cache=False).logits
        return _log_probs(logits_BTV, tokens_BT)[0], tokens_BT.numel()


def _log_probs(logits_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    """Log-prob of each token given those before it, 0.0 at the first of a row (its weight is 0 in any case)."""
    found = logits_BTV[:, :-1].log_softmax(-1).gather(-1, tokens_BT[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(found, (1, 0))
