"""Row order of fused tensors, by hand; and that the wrong order would be seen."""

from __future__ import annotations

import torch

from vime.backends.megatron.weights import fuse, split
from vime.models import ModelSpec

SPEC = ModelSpec(
    family="qwen3",
    num_layers=1,
    hidden_size=1,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=1,
    ffn_hidden_size=2,
    vocab_size=8,
    is_tied=False,
    has_qkv_bias=False,
    has_qk_norm=False,
    rms_norm_eps=1e-6,
    rope={"rope_type": "default", "rope_theta": 1e4},
    max_position_embeddings=8,
    dtype="float32",
)


def test_query_key_value_are_interleaved_by_group():
    q, k, v = torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11]), torch.tensor([20, 21])
    fused = fuse(SPEC, [q, k, v])
    assert fused.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert [part.tolist() for part in split(SPEC, fused, 3)] == [q.tolist(), k.tolist(), v.tolist()]


def test_gate_lies_over_up_and_plain_shard_order_would_not_round_trip():
    gate, up = torch.tensor([0, 1]), torch.tensor([10, 11])
    fused = fuse(SPEC, [gate, up])
    assert fused.tolist() == [0, 1, 10, 11]
    assert [part.tolist() for part in split(SPEC, fused, 2)] == [[0, 1], [10, 11]]
    in_rank_order = torch.tensor([0, 10, 1, 11])  # [g0 u0 g1 u1]: right shape, wrong rows
    assert [part.tolist() for part in split(SPEC, in_rank_order, 2)] != [[0, 1], [10, 11]]
