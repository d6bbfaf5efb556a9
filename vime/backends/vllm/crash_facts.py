"""What an engine's worker reads back of its own settings, under the names of ``vime.debug.crash.toggles``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from vime import device
from vime.debug.crash.toggles import SPECULATIVE

VARIABLES = (
    "CUDA_LAUNCH_BLOCKING",
    "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_USE_FLASHINFER_SAMPLER",
    "VLLM_USE_DEEP_GEMM",
    "TORCH_COMPILE_DISABLE",
    "CUDA_ENABLE_COREDUMP_ON_EXCEPTION",
)
ARGUMENTS = {
    "prefix_caching": "enable_prefix_caching",
    "chunked_prefill": "enable_chunked_prefill",
    "async_scheduling": "async_scheduling",
}
DISABLING = {"cascade_attention": "disable_cascade_attn", "custom_all_reduce": "disable_custom_all_reduce"}


def facts(worker: Any) -> dict[str, Any]:
    """Plain data, from the live configuration, the live model runner and the environment of this worker."""
    found = worker.vllm_config
    parallel, compilation = found.parallel_config, found.compilation_config
    speculative = found.speculative_config
    return {
        "device": device.kind(),
        "pid": os.getpid(),
        "enforce_eager": bool(found.model_config.enforce_eager),
        "cudagraph_mode": compilation.cudagraph_mode.name,
        "cudagraph_capture_sizes": sorted(compilation.cudagraph_capture_sizes or []),
        "compilation_mode": int(compilation.mode or 0),
        "speculative": None if speculative is None else str(speculative.method),
        "enable_prefix_caching": bool(found.cache_config.enable_prefix_caching),
        "enable_chunked_prefill": bool(found.scheduler_config.enable_chunked_prefill),
        "disable_cascade_attn": bool(found.model_config.disable_cascade_attn),
        "async_scheduling": bool(found.scheduler_config.async_scheduling),
        "world_size": int(parallel.world_size),
        "disable_custom_all_reduce": bool(parallel.disable_custom_all_reduce),
        "expert_parallel": bool(parallel.enable_expert_parallel),
        "all2all_backend": str(parallel.all2all_backend),
        "enable_dbo": bool(parallel.enable_dbo),
        "attention_backend": attention_backend(worker.model_runner),
        "max_num_seqs": int(found.scheduler_config.max_num_seqs),
        "max_num_batched_tokens": int(found.scheduler_config.max_num_batched_tokens),
        "kv_cache_dtype": str(found.cache_config.cache_dtype),
        "block_size": int(found.cache_config.block_size),
        "enable_sleep_mode": bool(found.model_config.enable_sleep_mode),
        "model_runner": "V2" if ".worker.gpu." in type(worker.model_runner).__module__ else "V1",
        **{f"env {name}": os.environ.get(name) for name in VARIABLES},
    }


def agreed(of_workers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The facts of an engine: what all its workers read; where they differ, the list of what each reads."""
    first, *others = of_workers
    return {
        name: value if all(other[name] == value for other in others) else [facts[name] for facts in of_workers]
        for name, value in first.items()
    }


def attention_backend(runner: Any) -> str:
    """Of the layers of the live model: what was chosen, not what was asked for."""
    names = {group.backend.get_name() for groups in runner.attn_groups for group in groups}
    return ", ".join(sorted(names))


def in_force(found: Mapping[str, Any]) -> dict[str, bool]:
    """The switches of ``vime.debug.crash.planted`` as the worker reads them."""
    return {
        "eager": found["enforce_eager"],
        "cuda_graph": found["cudagraph_mode"] != "NONE",
        "compile": found["compilation_mode"] != 0,
        "speculative": found["speculative"] is not None,
        "launch_blocking": found["env CUDA_LAUNCH_BLOCKING"] == "1",
        **{switch: found[name] for switch, name in ARGUMENTS.items()},
        **{switch: not found[name] for switch, name in DISABLING.items()},
    }


def asked(arguments: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, bool]:
    """The same as the engine arguments ask for them; what they leave open is as in force."""
    now = in_force(found)
    compilation = arguments.get("compilation_config") or {}
    eager = bool(arguments.get("enforce_eager", False))
    return {
        "eager": eager,
        "cuda_graph": not eager and compilation.get("cudagraph_mode") != "NONE",
        "compile": not eager and compilation.get("mode") != 0,
        "speculative": any(arguments.get(name) for name in SPECULATIVE),
        "launch_blocking": now["launch_blocking"],
        **{switch: bool(_given(arguments, name, now[switch])) for switch, name in ARGUMENTS.items()},
        **{switch: not _given(arguments, name, not now[switch]) for switch, name in DISABLING.items()},
    }


def _given(arguments: Mapping[str, Any], name: str, otherwise: bool) -> bool:
    value = arguments.get(name)
    return otherwise if value is None else bool(value)
