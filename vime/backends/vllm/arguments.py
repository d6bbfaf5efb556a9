"""AsyncEngineArgs from the configuration: what vime derives, explicit defaults, then the user's ``[vllm]`` on top."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vime.backends.vllm.derived import DERIVED_ENGINE
from vime.config.schema import Config
from vime.errors import UsageError

DEFAULT_MAX_NUM_SEQS = 256
MAX_DEFAULT_KV_BYTES = 512 << 20
CPU_BLOCK = 128  # tokens per KV block on the CPU platform


def read_model_config(path: str) -> dict[str, Any]:
    """config.json of the model folder; the text part where there are several. Raises UsageError if it is missing."""
    file = Path(path) / "config.json"
    if not file.exists():
        raise UsageError(f"model.path = {path}: no config.json", "give the folder of a Hugging Face model")
    config = json.loads(file.read_text())
    return {**config, **(config.get("text_config") or {})}


def max_model_len(config: Config, model: dict[str, Any]) -> int:
    """Longest prompt + response in tokens, at most the model's context. Raises UsageError if more was asked for."""
    context = model.get("max_position_embeddings")
    wanted = config.rollout.max_context_len
    if wanted is not None and context is not None and wanted > context:
        raise UsageError(
            f"rollout.max_context_len = {wanted} is over the model's context {context} (max_position_embeddings)",
            f"use at most {context}",
        )
    if wanted is None and config.data.max_prompt_len is not None:
        wanted = config.data.max_prompt_len + config.longest_response
        wanted = min(wanted, context or wanted)
    wanted = wanted or context
    if wanted is None:
        raise UsageError(
            "rollout.max_context_len is unset and config.json has no max_position_embeddings",
            "set rollout.max_context_len",
        )
    return wanted


def kv_cache_bytes(model: dict[str, Any], length: int, num_seqs: int, dtype: str, tp: int) -> int:
    """Key/value memory of one worker: ``num_seqs`` sequences of ``length`` tokens up to 512 MiB, at least one."""
    heads = model["num_attention_heads"]
    kv_heads = model.get("num_key_value_heads") or heads
    head_dim = model.get("head_dim") or model["hidden_size"] // heads
    kv_heads_here = max(1, kv_heads // tp)
    per_token = 2 * model["num_hidden_layers"] * kv_heads_here * head_dim * {"float32": 4, "bfloat16": 2}[dtype]
    one = (-(-length // CPU_BLOCK) + 1) * CPU_BLOCK * per_token
    # two blocks are vLLM's own: the null block and the watermark
    return max(one + 2 * CPU_BLOCK * per_token, min(num_seqs * one, MAX_DEFAULT_KV_BYTES))


def check_user_arguments(vllm: dict[str, Any]) -> None:
    """Refuse ``[vllm]`` keys that vime derives. Raises UsageError listing all of them with the reasons."""
    refused = [f"vllm.{key} = {vllm[key]!r}: {reason}" for key, reason in DERIVED_ENGINE.items() if key in vllm]
    if refused:
        raise UsageError("\n".join(refused), "remove these keys; vime derives them")


def engine_arguments(config: Config, on_cpu: bool) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs."""
    check_user_arguments(config.vllm)
    model = read_model_config(config.model.path)
    length = max_model_len(config, model)
    num_seqs = int(config.vllm.get("max_num_seqs", DEFAULT_MAX_NUM_SEQS))
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "max_model_len": length,
        "max_num_seqs": num_seqs,
        "seed": config.run.seed,
        "tensor_parallel_size": config.rollout.engine_tp,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "worker_extension_cls": "vime.backends.vllm.worker.WorkerExtension",
        "weight_transfer_config": {"backend": "vime_shm"},
        "enable_sleep_mode": config.cluster.colocate and not on_cpu,
        "disable_log_stats": True,
    }
    if on_cpu:
        arguments["enforce_eager"] = True
        arguments["scheduler_cls"] = "vime.backends.vllm.scheduler.WholeAnswerScheduler"
        tp = config.rollout.engine_tp
        arguments["kv_cache_memory_bytes"] = kv_cache_bytes(model, length, num_seqs, config.model.dtype, tp)
    return arguments | config.vllm
