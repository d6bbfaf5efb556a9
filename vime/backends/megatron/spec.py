"""Which layers the model is made of: transformer-engine's on a GPU, the local ones on the CPU. Never a silent swap."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE, get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig

from vime import device
from vime.backends.megatron.layers import (
    ExpertColumnLinear,
    ExpertRowLinear,
    NormColumnParallelLinear,
    PackedAttention,
    RMSNorm,
)
from vime.errors import VimeError


def uses_transformer_engine() -> bool:
    """True on a GPU. Raises VimeError on a GPU without transformer-engine: the local layers are for the CPU."""
    if device.kind() == "cpu":
        return False
    if not HAVE_TE:
        raise VimeError(
            "training on a GPU needs transformer-engine, and it cannot be imported",
            "install vime's gpu extra; python -c 'import transformer_engine.pytorch' shows why the import fails",
        )
    return True


def effective_spec() -> str:
    """What is really used, for reports."""
    if uses_transformer_engine():
        return "transformer-engine layers"
    return (
        "local layers: RMSNorm fused by name into linear_qkv and (dense) linear_fc1, experts one by one, "
        "torch SDPA per packed sequence"
    )


def block_spec(config: TransformerConfig, vp_stage: int | None = None) -> Any:
    """Layer spec of one pipeline chunk. The transformer-engine branch was not run without a GPU."""
    if uses_transformer_engine():
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    for layer in spec.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = IdentityOp
        attention = parts.self_attention.submodules
        attention.linear_qkv, attention.core_attention = NormColumnParallelLinear, PackedAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
        if config.num_moe_experts is None:
            parts.pre_mlp_layernorm = IdentityOp
            parts.mlp.submodules.linear_fc1 = NormColumnParallelLinear
        else:  # router and experts read the same normed input
            parts.pre_mlp_layernorm = RMSNorm
            experts = parts.mlp.submodules.experts.submodules
            experts.linear_fc1, experts.linear_fc2 = ExpertColumnLinear, ExpertRowLinear
        parts.sharded_state_dict_keys_map = {}  # checkpoint keys are the parameter names, as with transformer-engine
    spec.layer_norm = RMSNorm
    return spec
