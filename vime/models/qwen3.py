"""Qwen3, dense: RMSNorm of queries and keys per head, no biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.errors import UsageError
from vime.models.config_json import dense
from vime.models.spec import ModelSpec


def spec(config: Mapping[str, Any]) -> ModelSpec:
    if config.get("attention_bias"):  # Qwen3's flag also puts a bias on o_proj
        raise UsageError("model.path: config.json has attention_bias = True, which is not supported for qwen3")
    return dense("qwen3", {"head_dim": 128, **config}, has_qkv_bias=False, has_qk_norm=True)
