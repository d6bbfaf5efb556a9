"""Micro-batch plans: every row once, equal counts, bounded tokens; packing is a pure rearrangement."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.train.packing import FILLER_TOKENS, pack, pack_tokens, plan_micro_batches, token_index
from vime.types import TrainData


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 120), st.integers(1, 3))
def test_plan_covers_each_row_once_with_equal_counts(lengths, dp_size, max_tokens, multiple_of):
    lengths = np.array(lengths)
    plan = plan_micro_batches(lengths, dp_size, max_tokens, multiple_of)
    assert len(plan) == dp_size
    assert len({len(p) for p in plan}) == 1
    assert len(plan[0]) % multiple_of == 0
    rows = np.concatenate([m for p in plan for m in p])
    assert sorted(rows.tolist()) == list(range(len(lengths)))
    for micro_batch in (m for p in plan for m in p):
        assert lengths[micro_batch].sum() <= max_tokens or len(micro_batch) == 1


def test_ranks_are_balanced():
    plan = plan_micro_batches(np.array([8, 1, 1, 1, 1, 4]), 2, 100)
    loads = [sum(np.array([8, 1, 1, 1, 1, 4])[m].sum() for m in p) for p in plan]
    assert loads == [8, 8]


def test_a_rank_without_rows_gets_fillers():
    plan = plan_micro_batches(np.array([5]), 2, 100)
    assert [m.tolist() for m in plan[0]] == [[0]]
    assert [m.tolist() for m in plan[1]] == [[]]


def data(lengths):
    total = sum(lengths)
    return TrainData(
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        token_ids_T=np.arange(total, dtype=np.int32),
        loss_weight_T=np.arange(total, dtype=np.float32),
        advantages_T=-np.arange(total, dtype=np.float32),
        rollout_log_probs_T=np.zeros(total, np.float32),
        old_log_probs_T=np.zeros(total, np.float32),
        ref_log_probs_T=None,
        normalizer=1.0,
        sample_ids=[f"0/{i}" for i in range(len(lengths))],
    )


def test_pack_takes_rows_in_order():
    batch = pack(data([3, 2, 4]), np.array([2, 0]))
    assert batch.tokens_T.tolist() == [5, 6, 7, 8, 0, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 4, 7]
    assert batch.loss_weight_T.tolist() == [5, 6, 7, 8, 0, 1, 2]
    assert batch.sample_ids == ["0/2", "0/0"]


def test_filler_has_tokens_and_no_weight():
    batch = pack(data([3]), np.empty(0, np.int64))
    assert len(batch.tokens_T) == FILLER_TOKENS
    assert batch.loss_weight_T.sum() == 0
    assert batch.sample_ids == []


@pytest.mark.parametrize("rows", [[0], [1, 0], [2, 1, 0]])
def test_token_index_inverts(rows):
    offsets, flat = np.array([0, 3, 5, 9]), np.arange(9)
    tokens, _ = pack_tokens(offsets, flat, np.array(rows))
    out = np.full(9, -1)
    out[token_index(offsets, np.array(rows))] = tokens
    for row in rows:
        assert out[offsets[row] : offsets[row + 1]].tolist() == flat[offsets[row] : offsets[row + 1]].tolist()
