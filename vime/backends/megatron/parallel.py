"""Process groups of one trainer: built from ``Parallel``, with a time limit on every collective."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from vime import device
from vime.config.schema import Parallel
from vime.errors import VimeError


def init(
    parallel: Parallel,
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    timeout_seconds: float,
    seed: int,
) -> None:
    """Join the other ranks and build Megatron's groups. Every collective gives up after ``timeout_seconds``.

    Raises VimeError if the layout does not use exactly ``world_size`` processes.
    """
    if parallel.world_size != world_size:
        raise VimeError(
            f"parallel: tp x pp x cp x dp = {parallel.world_size}, but {world_size} trainer processes were started"
        )
    device.select(rank)
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(
        device.backend(),
        init_method=f"tcp://{master_addr}:{master_port}",
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.expert_tp,
        distributed_timeout_minutes=timeout_seconds / 60,  # becomes a timedelta: fractions are fine
    )
    device.seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def shutdown() -> None:
    """Leave all groups; ``init`` may be called again."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def dp_rank() -> int:
    return parallel_state.get_data_parallel_rank()


def is_last_stage() -> bool:
    """This rank computes the logits."""
    return (
        parallel_state.get_pipeline_model_parallel_rank() == parallel_state.get_pipeline_model_parallel_world_size() - 1
    )


def is_first_of_last_stage() -> bool:
    """Of the tensor-parallel ranks that compute the same numbers on the last stage, the first."""
    return parallel_state.get_tensor_model_parallel_rank() == 0 and is_last_stage()


def owns_results() -> bool:
    """Of all ranks that compute the same numbers, this is the one that returns them: last stage, tp 0, cp 0."""
    return is_first_of_last_stage() and parallel_state.get_context_parallel_rank() == 0


def is_first_of_stage() -> bool:
    """Of the tensor- and context-parallel ranks of this pipeline stage, the first."""
    return parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0


def last_stage_rank() -> int:
    """Global rank of the last pipeline stage of this rank's pipeline."""
    return parallel_state.get_pipeline_model_parallel_last_rank()


def describe(parallel: Parallel) -> str:
    """The layout in one line."""
    parts = [f"tp {parallel.tp}", f"pp {parallel.pp}", f"cp {parallel.cp}", f"dp {parallel.dp}"]
    if parallel.ep > 1 or parallel.etp is not None:
        parts.append(f"ep {parallel.ep}, etp {parallel.expert_tp}")
    if parallel.vpp is not None:
        parts.append(f"vpp {parallel.vpp}")
    if parallel.sequence_parallel:
        parts.append("sequence parallel")
    if parallel.distributed_optimizer:
        parts.append("distributed optimizer")
    return ", ".join(parts)
