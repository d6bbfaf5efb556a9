"""Packed micro-batches through the model: layout of the tokens on this rank, and log-probs back in token order.

Axes: T tokens of the samples of one micro-batch, P positions of the padded pack (all context-parallel ranks), S the
positions on this rank. The log-prob of token t comes out at the position of token t - 1, its predecessor; targets and
weights are laid out on the whole pack, before it is split, so that no context-parallel boundary can shift them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from vime import device
from vime.backends.megatron.build import Model
from vime.backends.megatron.layers import MIN_ROWS
from vime.backends.megatron.log_probs import log_probs_and_entropy
from vime.config.schema import Parallel

MIN_TOKENS_PER_RANK = MIN_ROWS
"""A token's result then does not depend on its pack."""


@dataclass(frozen=True)
class Pack:
    """Where each token of a micro-batch sits.

    tokens_P     int64, padding is token 0
    cu_seqlens   int32, ends of the padded sequences; the last one may be padding alone
    position_T   int64, position in the pack of each token
    is_scored_T  bool, False for the first token of each sequence, which no predecessor predicts
    """

    tokens_P: np.ndarray
    cu_seqlens: np.ndarray
    position_T: np.ndarray
    is_scored_T: np.ndarray

    @property
    def predictor_T(self) -> np.ndarray:
        """Positions whose logits predict the scored tokens (only those, in order)."""
        return self.position_T[self.is_scored_T] - 1

    def targets_P(self) -> np.ndarray:
        """int64: the next token of the same sequence; 0 where there is none."""
        targets = np.zeros(len(self.tokens_P), np.int64)
        targets[self.predictor_T] = self.tokens_P[self.position_T[self.is_scored_T]]
        return targets

    def to_positions(self, values_T: np.ndarray) -> np.ndarray:
        """Move per-token values to the positions that predict those tokens; 0 elsewhere."""
        out = np.zeros(len(self.tokens_P), values_T.dtype)
        out[self.predictor_T] = values_T[self.is_scored_T]
        return out

    def to_tokens(self, values_P: np.ndarray) -> np.ndarray:
        """Inverse of ``to_positions``: 0 at the first token of each sequence."""
        out = np.zeros(len(self.position_T), values_P.dtype)
        out[self.is_scored_T] = values_P[self.predictor_T]
        return out


def lay_out(tokens_T: np.ndarray, cu_seqlens: np.ndarray, parallel: Parallel) -> Pack:
    """Pad sequences to a multiple of 2 cp (zig-zag) and the pack to what sequence parallelism and MKL need."""
    unit = 2 * parallel.cp if parallel.cp > 1 else 1
    lengths = np.diff(cu_seqlens)
    padded = -(-lengths // unit) * unit
    starts = np.concatenate([[0], np.cumsum(padded)])
    within = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], lengths)
    position_T = np.repeat(starts[:-1], lengths) + within
    step = unit * (parallel.tp if parallel.sequence_parallel else 1)
    total = max(int(starts[-1]), MIN_TOKENS_PER_RANK * parallel.cp)
    total = -(-total // step) * step
    if total > starts[-1]:
        starts = np.append(starts, total)
    tokens_P = np.zeros(total, np.int64)
    tokens_P[position_T] = tokens_T
    return Pack(tokens_P, starts.astype(np.int32), position_T, within > 0)


def zigzag(cu_seqlens: np.ndarray, cp: int, rank: int) -> np.ndarray:
    """int64 [S]: positions of the pack that context-parallel rank ``rank`` holds (chunks r and 2 cp - 1 - r)."""
    if cp == 1:
        return np.arange(cu_seqlens[-1])
    parts = []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        chunk = (end - start) // (2 * cp)
        for number in (rank, 2 * cp - 1 - rank):
            parts.append(np.arange(start + number * chunk, start + (number + 1) * chunk))
    return np.concatenate(parts)


@dataclass
class Micro:
    """One micro-batch on this rank's device, with ``payload`` for the loss."""

    number: int
    pack: Pack
    index_S: np.ndarray
    tokens_S: Tensor
    targets_S: Tensor
    packed: PackedSeqParams
    payload: Any = None

    def local(self, values_T: np.ndarray) -> Tensor:
        """Per-token values at this rank's positions, on its device."""
        return _tensor(self.pack.to_positions(values_T)[self.index_S])


def make_micro(number: int, tokens_T: np.ndarray, cu_seqlens: np.ndarray, parallel: Parallel, payload: Any) -> Micro:
    pack = lay_out(tokens_T, cu_seqlens, parallel)
    index_S = zigzag(pack.cu_seqlens, parallel.cp, parallel_state.get_context_parallel_rank())
    return Micro(
        number,
        pack,
        index_S,
        _tensor(pack.tokens_P[index_S]),
        _tensor(pack.targets_P()[index_S]),
        _packed(pack),
        payload,
    )


def _packed(pack: Pack) -> PackedSeqParams:
    ends = _tensor(pack.cu_seqlens)
    # The true longest sequence: the number of tokens instead would let rope positions run on across sequences.
    longest = int(np.diff(pack.cu_seqlens).max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device.current())


LossOf = Callable[[Micro, Tensor], Any]


def run_schedule(model: Model, micros: Sequence[Micro], loss_of: LossOf, *, forward_only: bool) -> list[Any]:
    """One pass of all micro-batches through Megatron's schedule for this layout.

    ``loss_of(micro, logits [S, V / tp])`` runs on the last stage: it returns ``(loss, result)``, or the result alone
    where ``forward_only``. Returns the results (empty on other stages).
    """

    def forward_step(iterator: Iterator[Micro], chunk: Any, *_: Any) -> tuple[Tensor, Callable[..., Any]]:
        micro = next(iterator)
        output = chunk(
            input_ids=micro.tokens_S[None], position_ids=None, attention_mask=None, packed_seq_params=micro.packed
        )
        return output, partial(finish, micro)

    def finish(micro: Micro, output: Tensor, non_loss_data: bool = False) -> Any:
        if non_loss_data:
            return loss_of(micro, output[0])
        loss, result = loss_of(micro, output[0])
        return loss, torch.ones((), dtype=torch.int), result

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micros) for _ in model.chunks],
        model=model.chunks,
        num_microbatches=len(micros),
        seq_length=1,  # with variable_seq_lengths the true lengths travel with the activations
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def score(model: Model, micro: Micro, logits: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
    """Log-prob of the next token, and entropy, at this rank's positions [S]."""
    group = parallel_state.get_tensor_model_parallel_group()
    return log_probs_and_entropy(logits, micro.targets_S, group, temperature, model.spec.vocab_size, with_entropy)


@torch.no_grad()
def compute_log_probs(model: Model, micros: Sequence[Micro], temperature: float) -> dict[int, np.ndarray]:
    """Micro-batch number -> float32 [T], 0.0 at each first token. Empty on all but the last pipeline stage."""

    def loss_of(micro: Micro, logits: Tensor) -> tuple[Micro, Tensor]:
        return micro, score(model, micro, logits, temperature, with_entropy=False)[0]

    results = run_schedule(model, micros, loss_of, forward_only=True)
    return {micro.number: micro.pack.to_tokens(_whole(micro, values_S)) for micro, values_S in results}


def _whole(micro: Micro, values_S: Tensor) -> np.ndarray:
    """float32 [P] from all context-parallel ranks; each position comes from one rank, the others add 0."""
    group = parallel_state.get_context_parallel_group()
    whole = torch.zeros(len(micro.pack.tokens_P), dtype=values_S.dtype, device=values_S.device)
    whole[_tensor(micro.index_S)] = values_S
    if group.size() > 1:
        dist.all_reduce(whole, group=group)
    return whole.cpu().numpy()
