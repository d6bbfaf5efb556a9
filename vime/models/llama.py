"""Llama 2 and 3, SmolLM2: no biases, no norm of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.errors import UsageError
from vime.models.config_json import dense
from vime.models.spec import ModelSpec


def spec(config: Mapping[str, Any]) -> ModelSpec:
    if config.get("attention_bias"):  # Llama's flag also puts a bias on o_proj
        raise UsageError("model.path: config.json has attention_bias = True, which is not supported for llama")
    return dense("llama", config, has_qkv_bias=False, has_qk_norm=False)
