"""Keys of Megatron-core's dataclasses that vime derives or must hold fixed, each with the reason. Imports nothing.

The configuration checker refuses these keys under ``[megatron.*]``; every other field of the dataclass passes through.
"""

from __future__ import annotations

_MODEL = "it follows from model.path/config.json"
_DTYPE = "set by model.dtype"
_INTERNAL = "set by the trainer"

DERIVED_TRANSFORMER: dict[str, str] = {
    **dict.fromkeys(
        (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "ffn_hidden_size",
            "layernorm_epsilon",
            "layernorm_zero_centered_gamma",
            "normalization",
            "activation_func",
            "gated_linear_unit",
            "add_bias_linear",
            "add_qkv_bias",
            "qk_layernorm",
            "qk_l2_norm",
            "rotary_interleaved",
            "softmax_scale",
            "softmax_type",
            "window_size",
            "window_attn_skip_freq",
            "no_rope_freq",
            "multi_latent_attention",
            "attention_output_gate",
            "experimental_attention_variant",
            "apply_residual_connection_post_layernorm",
            "num_moe_experts",
            "moe_layer_freq",
            "moe_ffn_hidden_size",
            "moe_router_topk",
            "moe_router_pre_softmax",
            "moe_router_score_function",
            "moe_router_num_groups",
            "moe_router_group_topk",
            "moe_router_topk_limited_devices",
            "moe_router_topk_scaling_factor",
            "moe_shared_expert_intermediate_size",
            "moe_shared_expert_gate",
            "moe_latent_size",
            "mtp_num_layers",
        ),
        _MODEL,
    ),
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16"), _DTYPE),
    "tensor_model_parallel_size": "set by parallel.tp",
    "pipeline_model_parallel_size": "set by parallel.pp",
    "virtual_pipeline_model_parallel_size": "set by parallel.vpp",
    "context_parallel_size": "set by parallel.cp",
    "sequence_parallel": "set by parallel.sequence_parallel",
    "num_layers_in_first_pipeline_stage": "set by parallel.num_layers_in_first_stage",
    "num_layers_in_last_pipeline_stage": "set by parallel.num_layers_in_last_stage",
    "pipeline_model_parallel_layout": "stages follow from parallel.num_layers_in_first_stage/last_stage",
    "account_for_embedding_in_pipeline_split": "stages follow from parallel.num_layers_in_first_stage/last_stage",
    "account_for_loss_in_pipeline_split": "stages follow from parallel.num_layers_in_first_stage/last_stage",
    "expert_model_parallel_size": "set by parallel.ep",
    "expert_tensor_parallel_size": "set by parallel.etp",
    "moe_router_load_balancing_type": "must be none: a balancing loss has no place in the step's one normaliser",
    "moe_aux_loss_coeff": "must be 0: a balancing loss has no place in the step's one normaliser",
    "moe_z_loss_coeff": "must be unset: a loss of the router has no place in the step's one normaliser",
    "moe_router_enable_expert_bias": "must be False: the engine's router has no bias of experts",
    "moe_input_jitter_eps": "must be unset: two forwards over the same weights have to give the same log-probs",
    "moe_router_force_load_balancing": "must be False: it routes at random",
    "moe_expert_capacity_factor": "must be unset: the engine drops no tokens",
    "moe_token_dropping": "must be False: the engine drops no tokens",
    "hidden_dropout": "must be 0: two forwards over the same weights have to give the same log-probs",
    "attention_dropout": "must be 0: two forwards over the same weights have to give the same log-probs",
    "perform_initialization": "must be True: otherwise tensor-parallel parameters lose the marks that say how to split",
    "use_cpu_initialization": "must be False: otherwise every rank builds the whole weight first",
    "batch_p2p_comm": "follows from parallel.vpp: with two interleaved stages True gives wrong gradients, no error",
    "overlap_p2p_comm": "follows from parallel.vpp: with two interleaved stages False gives wrong gradients, no error",
    "variable_seq_lengths": "must be True: packed micro-batches have different lengths",
    "moe_token_dispatcher_type": "must be alltoall: variable sequence lengths need it, for dense models too",
    "calculate_per_token_loss": "must be True: the loss has one normaliser for the whole step",
    **dict.fromkeys(
        ("finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func", "timers"),
        _INTERNAL,
    ),
}

DERIVED_OPTIMIZER: dict[str, str] = {
    "optimizer": "only adam is supported",
    "lr": "set by train.lr",
    "min_lr": "set by train.min_lr",
    "decoupled_lr": "all parameters follow train.lr",
    "decoupled_min_lr": "all parameters follow train.min_lr",
    "weight_decay": "set by train.weight_decay",
    "decoupled_weight_decay": "train.weight_decay is decoupled",
    "adam_beta1": "set by train.adam_beta1",
    "adam_beta2": "set by train.adam_beta2",
    "adam_eps": "set by train.adam_eps",
    "clip_grad": "set by train.clip_grad (0 would make Megatron report a gradient norm of 0)",
    "use_distributed_optimizer": "set by parallel.distributed_optimizer",
    "overlap_param_gather": "set by megatron.ddp.overlap_param_gather",
    "overlap_param_gather_with_optimizer_step": "weights are read right after the step",
    **dict.fromkeys(("bf16", "fp16", "params_dtype"), _DTYPE),
    **dict.fromkeys(
        ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"), "fp16 only"
    ),
    "timers": _INTERNAL,
}

DERIVED_DDP: dict[str, str] = {
    "use_distributed_optimizer": "set by parallel.distributed_optimizer",
    "average_in_collective": "gradients are summed: the loss has one normaliser for the whole step",
    "check_for_nan_in_grad": "set by train.nan_policy",
    "check_for_large_grads": "set by train.nan_policy",
    "num_distributed_optimizer_instances": "must be 1",
    "use_megatron_fsdp": "not supported",
    "use_custom_fsdp": "not supported",
}
