"""Reading config.json: the part that all families share, and the refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vime.errors import UsageError
from vime.models.spec import ModelSpec

ROPE_TYPES = ("default", "linear", "llama3")
"""Rope types whose frequencies do not depend on the sequence and leave the attention scores unscaled."""

SIZES = (
    "num_attention_heads",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


def dense(family: str, config: Mapping[str, Any], *, has_qkv_bias: bool, has_qk_norm: bool) -> ModelSpec:
    """ModelSpec of a dense Llama-like model. Raises UsageError for a feature that would silently be left out."""
    refuse(config)
    sizes = {name: positive(config, name) for name in SIZES}
    heads = sizes["num_attention_heads"]
    head_dim = config.get("head_dim") or sizes["hidden_size"] // heads
    return ModelSpec(
        family=family,
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        num_attention_heads=heads,
        num_query_groups=int(config.get("num_key_value_heads") or heads),
        head_dim=int(head_dim),
        ffn_hidden_size=sizes["intermediate_size"],
        vocab_size=sizes["vocab_size"],
        is_tied=bool(config.get("tie_word_embeddings", False)),
        has_qkv_bias=has_qkv_bias,
        has_qk_norm=has_qk_norm,
        rms_norm_eps=float(config["rms_norm_eps"]),
        rope=rope(config),
        max_position_embeddings=sizes["max_position_embeddings"],
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )


def positive(config: Mapping[str, Any], name: str) -> int:
    """A size of config.json. Raises KeyError where it is missing, UsageError where it is no positive integer."""
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"model.path: config.json has {name} = {value!r}: must be an integer >= 1")
    return value


def refuse(config: Mapping[str, Any]) -> None:
    """Raise UsageError for features that no family here implements."""
    if config.get("hidden_act", "silu") != "silu":
        raise _unsupported("hidden_act", config["hidden_act"], "only silu")
    if config.get("mlp_bias"):
        raise _unsupported("mlp_bias", True, "only False")
    if config.get("use_sliding_window"):
        raise _unsupported("use_sliding_window", True, "only False")
    layer_types = set(config.get("layer_types") or ()) - {"full_attention"}
    if layer_types:
        raise _unsupported("layer_types", sorted(layer_types), "only full_attention")
    if config.get("quantization_config"):
        raise _unsupported("quantization_config", "set", "only unquantised weights")


def rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """One form for both spellings: ``rope_parameters``, and the older ``rope_theta`` with ``rope_scaling``."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = found.pop("rope_type", None) or found.pop("type", None) or "default"
    found.pop("type", None)
    theta = found.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    if kind not in ROPE_TYPES:
        raise _unsupported("rope_type", kind, f"one of {', '.join(ROPE_TYPES)}")
    if (config.get("partial_rotary_factor") or found.get("partial_rotary_factor") or 1.0) != 1.0:
        raise _unsupported("partial_rotary_factor", config.get("partial_rotary_factor"), "only 1.0")
    found.pop("partial_rotary_factor", None)
    return {"rope_type": kind, "rope_theta": float(theta), **found}


def _unsupported(key: str, value: object, rule: str) -> UsageError:
    return UsageError(f"model.path: config.json has {key} = {value!r}, which is not supported ({rule})")
