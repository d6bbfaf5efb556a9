"""Model families: config.json -> ModelSpec, and the two-way table of tensor names. Imports neither torch nor numpy."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vime.errors import UsageError
from vime.models import llama, qwen2, qwen3, qwen3_moe
from vime.models.layout import check_layout
from vime.models.placement import StaticMap, layer_map, rank_names, static_map
from vime.models.spec import TABLE, ModelSpec, Rule, expert_of, hf_names, layer_of, megatron_name

__all__ = [
    "FAMILIES",
    "TABLE",
    "ModelSpec",
    "Rule",
    "StaticMap",
    "check_layout",
    "expert_of",
    "hf_names",
    "layer_map",
    "layer_of",
    "load_spec",
    "megatron_name",
    "rank_names",
    "static_map",
]

FAMILIES: dict[str, Callable[[Mapping[str, Any]], ModelSpec]] = {
    "llama": llama.spec,
    "qwen2": qwen2.spec,
    "qwen3": qwen3.spec,
    "qwen3_moe": qwen3_moe.spec,
}
"""config.json's ``model_type`` -> reader of that family."""


def load_spec(path: str | Path) -> ModelSpec:
    """Read ``config.json`` of a Hugging Face folder.

    Raises UsageError if it is missing, no JSON, of an unknown family (all are listed), or uses an unsupported feature.
    """
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"model.path = {str(path)!r}: no config.json there", "give a Hugging Face folder") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise UsageError(f"{file}: holds no JSON object")
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UsageError(f"{file}: model_type = {family!r} is not supported", f"supported families: {known}")
    try:
        return replace(FAMILIES[family](config), path=str(path))
    except KeyError as error:
        raise UsageError(f"{file}: {error} is missing") from None
    except (TypeError, ValueError, AttributeError, OverflowError, ZeroDivisionError) as error:
        raise UsageError(f"{file}: a value has the wrong type or size: {error}") from None
