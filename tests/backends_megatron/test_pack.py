"""Layout of a micro-batch on the ranks, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.backends.megatron.forward import MIN_TOKENS_PER_RANK, lay_out, zigzag
from vime.config.schema import Parallel


def test_targets_and_weights_sit_on_the_predecessor():
    """Sequences [5 6 7] and [8 9]: positions 0, 1 and 3 predict 6, 7 and 9; the rest is padding."""
    pack = lay_out(np.array([5, 6, 7, 8, 9]), np.array([0, 3, 5]), Parallel())
    assert pack.cu_seqlens.tolist() == [0, 3, 5, MIN_TOKENS_PER_RANK]
    assert pack.targets_P()[:5].tolist() == [6, 7, 0, 9, 0]
    assert pack.to_positions(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))[:6].tolist() == [2, 3, 0, 5, 0, 0]
    assert pack.to_tokens(np.arange(16.0)).tolist() == [0, 0, 1, 0, 3]


def test_context_parallel_pads_each_sequence_and_splits_it_in_a_zigzag():
    """cp 2: sequences of 3 and 6 become 4 and 8; rank 0 holds chunks 0 and 3, rank 1 chunks 1 and 2."""
    pack = lay_out(np.arange(1, 10), np.array([0, 3, 9]), Parallel(cp=2))
    assert pack.cu_seqlens.tolist() == [0, 4, 12, 2 * MIN_TOKENS_PER_RANK]
    assert pack.tokens_P[:12].tolist() == [1, 2, 3, 0, 4, 5, 6, 7, 8, 9, 0, 0]
    assert zigzag(np.array([0, 4, 12]), 2, 0).tolist() == [0, 3, 4, 5, 10, 11]
    assert zigzag(np.array([0, 4, 12]), 2, 1).tolist() == [1, 2, 6, 7, 8, 9]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    cp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2, 3]),
)
def test_every_layout_holds_every_token_once(lengths, cp, tp):
    parallel = Parallel(cp=cp, tp=tp, sequence_parallel=tp > 1)
    tokens = np.arange(1, sum(lengths) + 1)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    pack = lay_out(tokens, ends, parallel)
    assert pack.tokens_P[pack.position_T].tolist() == tokens.tolist()
    assert pack.is_scored_T.sum() == sum(lengths) - len(lengths)
    shares = [zigzag(pack.cu_seqlens, cp, rank) for rank in range(cp)]
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(pack.tokens_P)))
    assert {len(share) % tp for share in shares} == {0}
    values = np.where(pack.is_scored_T, tokens, 0).astype(np.float32)
    assert pack.to_tokens(pack.to_positions(values)).tolist() == values.tolist()


@pytest.mark.parametrize("length", [1, 2, 3, 11])
def test_short_packs_are_padded_out_of_the_reach_of_small_matrix_kernels(length):
    assert len(lay_out(np.ones(length), np.array([0, length]), Parallel()).tokens_P) == MIN_TOKENS_PER_RANK
