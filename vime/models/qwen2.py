"""Qwen2 and Qwen2.5, dense: biases on query, key and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.models.config_json import dense
from vime.models.spec import ModelSpec


def spec(config: Mapping[str, Any]) -> ModelSpec:
    return dense("qwen2", config, has_qkv_bias=True, has_qk_norm=False)
