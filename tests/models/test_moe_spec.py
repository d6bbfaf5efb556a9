"""config.json of a Qwen3-MoE: what is read, and what would silently be another model."""

from __future__ import annotations

import json

import pytest

from vime.errors import UsageError
from vime.models import expert_of, load_spec

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}


def _spec(folder, **changes):
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return load_spec(folder)


def test_facts_of_the_experts(tmp_path):
    spec = _spec(tmp_path)
    assert (spec.num_experts, spec.num_experts_per_token, spec.expert_ffn_hidden_size) == (8, 2, 16)
    assert spec.renormalizes_experts
    assert spec.is_moe
    assert spec.has_qk_norm
    assert len(spec.tensors()) == 3 + 2 * (9 + 3 * 8)
    both = _spec(tmp_path, num_local_experts=4, norm_topk_prob=False)
    assert both.num_experts == 4
    assert not both.renormalizes_experts
    assert _spec(tmp_path, num_experts_per_tok=1, norm_topk_prob=False).num_experts_per_token == 1


def test_expert_ids_of_both_sides():
    assert expert_of("model.layers.3.mlp.experts.12.down_proj.weight") == 12
    assert expert_of("decoder.layers.3.mlp.experts.linear_fc2.weight7") == 7
    assert expert_of("model.layers.3.mlp.gate.weight") is None
    assert expert_of("decoder.layers.3.mlp.linear_fc1.weight") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2: only 1"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 of num_experts = 8"),
        ({"num_experts_per_tok": 1}, "the router has no gradient"),
        ({"num_experts": 0}, "num_experts = 0: must be an integer >= 1"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size = None"),
    ],
)
def test_other_models_are_refused(tmp_path, changes, message):
    with pytest.raises(UsageError, match=message):
        _spec(tmp_path, **changes)
