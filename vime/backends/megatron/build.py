"""ModelSpec and configuration -> Megatron's dataclasses and GPTModel chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from vime import device
from vime.backends.megatron.derived import DERIVED_DDP, DERIVED_OPTIMIZER, DERIVED_TRANSFORMER
from vime.backends.megatron.spec import block_spec
from vime.config.schema import Config, Parallel
from vime.errors import ConfigError, UsageError
from vime.models import ModelSpec, check_layout
from vime.models.placement import padded_vocab_size

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Model:
    """One model on this rank: its facts, and one wrapped chunk per virtual pipeline stage."""

    spec: ModelSpec
    parallel: Parallel
    transformer: TransformerConfig
    chunks: list[Any]

    @property
    def modules(self) -> list[GPTModel]:
        """The chunks without their wrappers (DDP, Float16Module)."""
        return [unwrap(chunk) for chunk in self.chunks]


def unwrap(chunk: Any) -> GPTModel:
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module
    return chunk


def check_config(spec: ModelSpec, config: Config) -> None:
    """Raise ConfigError with every impossible layout fact and every ``[megatron.*]`` key that vime derives."""
    problems = check_layout(spec, config.parallel)
    for section, given, derived in (
        ("transformer", config.megatron.transformer, DERIVED_TRANSFORMER),
        ("optimizer", config.megatron.optimizer, DERIVED_OPTIMIZER),
        ("ddp", config.megatron.ddp, DERIVED_DDP),
    ):
        problems += [f"megatron.{section}.{key} = {given[key]!r}: {derived[key]}" for key in given if key in derived]
    if problems:
        raise ConfigError(problems)


def transformer_config(spec: ModelSpec, config: Config) -> TransformerConfig:
    """Megatron's model configuration. Fusions are on where transformer-engine is (not run without a GPU)."""
    parallel, dtype, is_gpu = config.parallel, DTYPES[config.model.dtype], device.kind() != "cpu"
    options: dict[str, Any] = {
        **_model_options(spec),
        **(_expert_options(spec, is_gpu) if spec.is_moe else {}),
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.expert_tp,
        "sequence_parallel": parallel.sequence_parallel,
        "num_layers_in_first_pipeline_stage": parallel.num_layers_in_first_stage,
        "num_layers_in_last_pipeline_stage": parallel.num_layers_in_last_stage,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "perform_initialization": True,
        "use_cpu_initialization": False,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "calculate_per_token_loss": True,
        # With two stages send_prev and send_next cannot be told apart: interleaving trains on wrong gradients, without
        # an error, unless p2p runs unbatched and overlapped (Megatron-LM #750).
        "batch_p2p_comm": parallel.vpp is None,
        "overlap_p2p_comm": parallel.vpp is not None,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": is_gpu,
        "bias_activation_fusion": is_gpu,
        "bias_dropout_fusion": is_gpu,
        "masked_softmax_fusion": is_gpu,
        "apply_rope_fusion": is_gpu,
    }
    given = dict(config.megatron.transformer)
    if isinstance(given.get("attention_backend"), str):
        given["attention_backend"] = _attention_backend(given["attention_backend"])
    return TransformerConfig(**{**options, **given})


def _attention_backend(name: str) -> AttnBackend:
    if name not in AttnBackend.__members__:
        known = ", ".join(AttnBackend.__members__)
        raise UsageError(f"megatron.transformer.attention_backend = {name!r}: not one of {known}")
    return AttnBackend[name]


def _model_options(spec: ModelSpec) -> dict[str, Any]:
    return {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_attention_heads,
        "num_query_groups": spec.num_query_groups,
        "kv_channels": spec.head_dim,
        "ffn_hidden_size": spec.ffn_hidden_size,
        "layernorm_epsilon": spec.rms_norm_eps,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "add_qkv_bias": spec.has_qkv_bias,
        "qk_layernorm": spec.has_qk_norm,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _expert_options(spec: ModelSpec, is_gpu: bool) -> dict[str, Any]:
    """Experts one by one on the CPU; grouped, with a fused permutation, on a GPU (not run without one).

    No balancing loss, no bias of experts, no capacity: the engine has none of them.
    """
    return {
        "num_moe_experts": spec.num_experts,
        "moe_ffn_hidden_size": spec.expert_ffn_hidden_size,
        "moe_router_topk": spec.num_experts_per_token,
        # softmax over the chosen experts is softmax over all, renormalised
        "moe_router_pre_softmax": not spec.renormalizes_experts,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": is_gpu,
        "moe_permute_fusion": is_gpu,
    }


def optimizer_config(config: Config) -> OptimizerConfig:
    train, is_bf16 = config.train, config.model.dtype == "bfloat16"
    options: dict[str, Any] = {
        "optimizer": "adam",
        "lr": train.lr,
        "min_lr": train.min_lr,
        "weight_decay": train.weight_decay,
        "adam_beta1": train.adam_beta1,
        "adam_beta2": train.adam_beta2,
        "adam_eps": train.adam_eps,
        "clip_grad": train.clip_grad,
        "bf16": is_bf16,
        "params_dtype": DTYPES[config.model.dtype],
        "use_distributed_optimizer": config.parallel.distributed_optimizer,
        "overlap_param_gather": bool(config.megatron.ddp.get("overlap_param_gather", False)),
    }
    return OptimizerConfig(**{**options, **config.megatron.optimizer})


def ddp_config(config: Config) -> DistributedDataParallelConfig:
    options: dict[str, Any] = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": config.parallel.distributed_optimizer,
        "average_in_collective": False,
    }
    return DistributedDataParallelConfig(**{**options, **config.megatron.ddp})


def build_model(spec: ModelSpec, config: Config) -> Model:
    """An initialised model on this rank's device; in bfloat16 wrapped by Float16Module."""
    transformer = transformer_config(spec, config)
    chunks: list[Any] = []
    for stage in range(config.parallel.vpp or 1):
        vp_stage = None if config.parallel.vpp is None else stage
        chunk: Any = _build_chunk(spec, config.parallel, transformer, vp_stage).to(device.current())
        _mark_experts(chunk)
        chunks.append(Float16Module(transformer, chunk) if transformer.bf16 else chunk)
    return Model(spec, config.parallel, transformer, chunks)


def _mark_experts(chunk: GPTModel) -> None:
    """Gradients of experts are summed over the ranks that hold the same experts, which are others than for the rest.

    Megatron 0.16.1 marks experts so only where ep > 1. With ep = 1 and another etp than tp their gradients would be
    summed over the wrong ranks, without an error (delete when upstream looks at both sizes). And a checkpoint would
    have one optimizer where ep = 1, two elsewhere, so that none could be loaded into the other.
    """
    for name, parameter in chunk.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False


def _build_chunk(spec: ModelSpec, parallel: Parallel, transformer: TransformerConfig, vp_stage: int | None) -> GPTModel:
    place: dict[str, Any] = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
    model = GPTModel(
        transformer,
        block_spec(transformer, vp_stage),
        vocab_size=padded_vocab_size(spec, parallel.tp),
        max_sequence_length=spec.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        share_embeddings_and_output_weights=spec.is_tied,
        position_embedding_type="rope",
        rotary_base=spec.rope["rope_theta"],
        vp_stage=vp_stage,
    )
    if spec.rope["rope_type"] != "default":
        model.rotary_pos_emb.inv_freq = _inverse_frequencies(spec)
    return model


def _inverse_frequencies(spec: ModelSpec) -> torch.Tensor:
    """float32 [head_dim / 2], from transformers: megatron's own rope scaling only knows one set of Llama 3 numbers."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.from_pretrained(spec.path, local_files_only=True, trust_remote_code=False)
    frequencies, scaling = ROPE_INIT_FUNCTIONS[spec.rope["rope_type"]](config, "cpu")
    assert scaling == 1.0, "a rope type that scales attention must not pass vime.models"
    return frequencies.to(device.current())
