"""Samples -> packed micro-batches: balanced over data-parallel ranks, bounded by a token budget, equal in number.

A micro-batch is sequences one after the other without padding; which sequences share one changes nothing but speed.
"""

from __future__ import annotations

import numpy as np

from vime.types import TrainBatch, TrainData

FILLER_TOKENS = 2


def plan_micro_batches(
    lengths_N: np.ndarray, dp_size: int, max_tokens: int, multiple_of: int = 1
) -> list[list[np.ndarray]]:
    """Row ids per [dp rank][micro-batch], a pure function of the arguments, so that every rank finds the same plan.

    Sequences go, longest first, to the rank with the fewest tokens, then into the fullest micro-batch with room. Every
    rank gets the same number of micro-batches, a multiple of ``multiple_of``; an empty array is a filler. (Unequal
    counts hang collectives; interleaved pipelines need multiples of the number of stages.)
    """
    order = np.argsort(-np.asarray(lengths_N), kind="stable")
    tokens = [0] * dp_size
    rows: list[list[int]] = [[] for _ in range(dp_size)]
    for row in order.tolist():
        rank = min(range(dp_size), key=lambda r: (tokens[r], r))
        rows[rank].append(row)
        tokens[rank] += int(lengths_N[row])
    plan = [_fill(lengths_N, r, max_tokens) for r in rows]
    count = max(1, *(len(p) for p in plan))
    count = -(-count // multiple_of) * multiple_of
    return [p + [np.empty(0, np.int64)] * (count - len(p)) for p in plan]


def _fill(lengths_N: np.ndarray, rows: list[int], max_tokens: int) -> list[np.ndarray]:
    """Best-fit of ``rows`` (longest first) into micro-batches of at most ``max_tokens``; a longer one travels alone."""
    bins: list[list[int]] = []
    room: list[int] = []
    for row in rows:
        length = int(lengths_N[row])
        fits = [i for i, free in enumerate(room) if free >= length]
        if fits:
            best = min(fits, key=lambda i: room[i])
        else:
            bins.append([])
            room.append(max_tokens)
            best = len(bins) - 1
        bins[best].append(row)
        room[best] -= length
    return [np.sort(np.array(b, np.int64)) for b in bins]


def pack_tokens(offsets: np.ndarray, token_ids_T: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(tokens_T int64, cu_seqlens int32) of ``rows`` one after the other; a two-token filler for no rows."""
    if not len(rows):
        return np.zeros(FILLER_TOKENS, np.int64), np.array([0, FILLER_TOKENS], np.int32)
    lengths = np.diff(offsets)[rows]
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return token_ids_T[token_index(offsets, rows)].astype(np.int64), cu_seqlens


def token_index(offsets: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """int64 [T']: positions in a flat array of the tokens of ``rows``, in that order."""
    starts = offsets[:-1][rows]
    lengths = np.diff(offsets)[rows]
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.repeat(starts, lengths) + within


def pack(data: TrainData, rows: np.ndarray) -> TrainBatch:
    """One micro-batch of ``rows``; for no rows the filler, whose weights are all 0."""
    tokens_T, cu_seqlens = pack_tokens(data.offsets, data.token_ids_T, rows)
    index = token_index(data.offsets, rows) if len(rows) else None

    def take(column: np.ndarray) -> np.ndarray:
        return column[index] if index is not None else np.zeros(FILLER_TOKENS, np.float32)

    return TrainBatch(
        tokens_T=tokens_T,
        cu_seqlens=cu_seqlens,
        loss_weight_T=take(data.loss_weight_T),
        advantages_T=take(data.advantages_T),
        rollout_log_probs_T=take(data.rollout_log_probs_T),
        old_log_probs_T=take(data.old_log_probs_T),
        ref_log_probs_T=None if data.ref_log_probs_T is None else take(data.ref_log_probs_T),
        rows=np.asarray(rows, np.int64),
        sample_ids=[data.sample_ids[i] for i in rows],
    )
