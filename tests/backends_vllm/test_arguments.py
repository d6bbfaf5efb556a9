from __future__ import annotations

import json

import pytest
from conftest import make_config

from vime.backends.vllm.arguments import engine_arguments, kv_cache_bytes
from vime.errors import UsageError

MODEL = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 4, "hidden_size": 128}


def folder(tmp_path, **changes) -> str:
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "max_position_embeddings": 1024, **changes}))
    return str(tmp_path)


def test_context_is_derived(tmp_path) -> None:
    path = folder(tmp_path)
    assert engine_arguments(make_config(path), True)["max_model_len"] == 1024
    data = {"prompts": ["x"], "max_prompt_len": 100}
    assert engine_arguments(make_config(path, data=data), True)["max_model_len"] == 124
    assert engine_arguments(make_config(path, rollout={"max_context_len": 99}), True)["max_model_len"] == 99
    with pytest.raises(UsageError, match=r"rollout\.max_context_len = 2000 is over the model's context 1024"):
        engine_arguments(make_config(path, rollout={"max_context_len": 2000}), True)


def test_key_value_memory_by_hand() -> None:
    token = 2 * 4 * 2 * 32 * 4  # keys and values, layers, heads, width, bytes
    assert kv_cache_bytes(MODEL, 128, 16, "float32", 1) == 16 * 256 * token
    assert kv_cache_bytes(MODEL, 128, 1, "bfloat16", 2) == (256 + 256) * token // 4
    assert kv_cache_bytes(MODEL, 1 << 20, 16, "float32", 1) > 512 << 20  # one whole sequence always fits


def test_user_arguments_go_on_top_but_derived_ones_are_refused(tmp_path) -> None:
    path = folder(tmp_path)
    assert engine_arguments(make_config(path, vllm={"enforce_eager": False}), True)["enforce_eager"] is False
    with pytest.raises(UsageError, match=r"vllm\.seed = 3: comes from run\.seed"):
        engine_arguments(make_config(path, vllm={"seed": 3}), True)
