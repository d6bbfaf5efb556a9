"""Qwen3-MoE: Qwen3's attention, and in every layer a router over experts, of which each token takes the best few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vime.errors import UsageError
from vime.models.config_json import dense, positive
from vime.models.spec import ModelSpec


def spec(config: Mapping[str, Any]) -> ModelSpec:
    """Raises UsageError where some layers are dense, or where the router's weight of an expert would be constant."""
    _refuse(config)
    model = dense("qwen3_moe", {"head_dim": 128, **config}, has_qkv_bias=False, has_qk_norm=True)
    # transformers 5 writes num_local_experts, older versions num_experts
    num_experts = positive(config, "num_local_experts" if "num_local_experts" in config else "num_experts")
    per_token = positive(config, "num_experts_per_tok")
    renormalizes = bool(config.get("norm_topk_prob", False))
    if per_token > num_experts:
        raise UsageError(
            f"model.path: config.json has num_experts_per_tok = {per_token} of num_experts = {num_experts}"
        )
    if per_token == 1 and renormalizes:
        raise UsageError(
            "model.path: config.json has num_experts_per_tok = 1 with norm_topk_prob = True: every expert's weight is "
            "1, and the router has no gradient"
        )
    return replace(
        model,
        num_experts=num_experts,
        num_experts_per_token=per_token,
        expert_ffn_hidden_size=positive(config, "moe_intermediate_size"),
        renormalizes_experts=renormalizes,
    )


def _refuse(config: Mapping[str, Any]) -> None:
    if config.get("attention_bias"):
        raise UsageError("model.path: config.json has attention_bias = True, which is not supported for qwen3_moe")
    if (config.get("decoder_sparse_step") or 1) != 1:
        value = config["decoder_sparse_step"]
        raise UsageError(f"model.path: config.json has decoder_sparse_step = {value}: only 1 (experts in every layer)")
    if config.get("mlp_only_layers"):
        value = config["mlp_only_layers"]
        raise UsageError(f"model.path: config.json has mlp_only_layers = {value}: only [] (experts in every layer)")
