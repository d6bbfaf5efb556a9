"""The memory of a rank that holds some of the experts, counted by hand."""

from __future__ import annotations

import pytest

from vime.config.schema import Config
from vime.forecast import forecast
from vime.models import ModelSpec

HIDDEN, EXPERTS, WIDTH, LAYERS, VOCAB = 16, 8, 24, 4, 64
SPEC = ModelSpec(
    family="qwen3_moe",
    num_layers=LAYERS,
    hidden_size=HIDDEN,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=8,
    ffn_hidden_size=99,
    vocab_size=VOCAB,
    is_tied=False,
    has_qkv_bias=False,
    has_qk_norm=True,
    rms_norm_eps=1e-6,
    rope={"rope_type": "default", "rope_theta": 1e4},
    max_position_embeddings=64,
    dtype="float32",
    num_experts=EXPERTS,
    num_experts_per_token=2,
    expert_ffn_hidden_size=WIDTH,
)
ATTENTION = 2 * 32 * HIDDEN + 2 * 16 * HIDDEN
DENSE = LAYERS * (ATTENTION + EXPERTS * HIDDEN + 2 * HIDDEN + 2 * 8) + 2 * VOCAB * HIDDEN + HIDDEN
EXPERT = LAYERS * 3 * HIDDEN * WIDTH


def trainer(**parallel):
    debug = {"train_only": True, "load_rollout_data": "r.pt"}
    config = Config.model_validate(
        {"model": {"path": "none"}, "data": {"prompts": ["none"]}, "parallel": parallel, "debug": debug}
    )
    return forecast(config, SPEC)


@pytest.mark.parametrize(
    ("parallel", "held", "optimizer"),
    [
        ({}, DENSE + 8 * EXPERT, DENSE + 8 * EXPERT),
        ({"dp": 2, "ep": 2}, DENSE + 4 * EXPERT, DENSE + 4 * EXPERT),
        ({"dp": 4, "ep": 2, "distributed_optimizer": True}, DENSE + 4 * EXPERT, DENSE // 4 + 4 * EXPERT // 2),
        ({"dp": 4, "ep": 4, "distributed_optimizer": True}, DENSE + 2 * EXPERT, DENSE // 4 + 2 * EXPERT),
        ({"dp": 2, "etp": 2}, DENSE + 8 * EXPERT // 2, DENSE + 8 * EXPERT // 2),
    ],
    ids=str,
)
def test_experts_are_counted_where_they_are(parallel, held, optimizer):
    (row,) = trainer(**parallel)
    assert (row.weights, row.gradients) == (4 * held, 4 * held)
    assert row.optimizer == 8 * optimizer


def test_stages_share_the_layers():
    first, last = trainer(pp=2, dp=2, ep=2)
    assert (first.count, last.count) == (2, 2)
    assert first.weights + last.weights == 4 * (DENSE + 4 * EXPERT)


def test_a_token_goes_to_a_few_experts():
    (one,), (both,) = trainer(), trainer(dp=2, ep=2)
    assert one.activations == both.activations
    per_layer = 6 * HIDDEN + 3 * 32 + 2 * 16 + 2 * (4 * WIDTH + 2 * HIDDEN)
    tokens = 4096
    assert one.activations == tokens * per_layer * LAYERS * 4 + 3 * 4 * tokens * VOCAB
