"""Faults planted in the trainer, so that one sees the comparison of two replays catch them (``vime.align.faults``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from vime.backends.megatron import parallel, weights
from vime.backends.megatron.build import Model
from vime.backends.megatron.step import Learner
from vime.types import TrainBatch

LOSS_SCALE, SHARD_ORDER, DROPPED_SAMPLE, HUNG_RANK = "loss-scale", "shard-order", "dropped-sample", "hung-rank"
RANK = 1
"""The data-parallel rank that the faults of the step are planted in."""
HANG_SECONDS = 86_400.0


def plant_in_weights(model: Model, names: Collection[str]) -> None:
    """``shard-order``: tensor-parallel ranks hold each other's shard of one matrix. A collective where it is named."""
    if SHARD_ORDER in names:
        _exchange_shards(model)


def plant_in_steps(learner: Learner, names: Collection[str]) -> None:
    """``loss-scale``, ``dropped-sample`` and ``hung-rank``, in the micro-batches of data-parallel rank 1."""
    if parallel.dp_rank() != RANK:
        return
    for name, damage in DAMAGES.items():
        if name in names:
            learner.damage = _both(learner.damage, damage)


@torch.no_grad()
def _exchange_shards(model: Model) -> None:
    """Of the first attention output that this pipeline stage holds; only the first stage's is touched."""
    if parallel_state.get_pipeline_model_parallel_rank() != 0:
        return
    group = parallel_state.get_tensor_model_parallel_group()
    held = dict(weights.named_parameters(model))
    parameter = held["decoder.layers.0.self_attention.linear_proj.weight"]
    shards = [torch.empty_like(parameter.data) for _ in range(group.size())]
    dist.all_gather(shards, parameter.data.contiguous(), group=group)
    parameter.copy_(shards[(group.rank() + 1) % group.size()])


def _count_twice(batches: list[TrainBatch]) -> list[TrainBatch]:
    return [replace(batch, loss_weight_T=2 * batch.loss_weight_T) for batch in batches]


def _hang(batches: list[TrainBatch]) -> list[TrainBatch]:
    """Longer than any limit; the run that ends ends it."""
    time.sleep(HANG_SECONDS)
    return batches


def _drop_last(batches: list[TrainBatch]) -> list[TrainBatch]:
    """Without the last sample: its tokens stay in the pack, as padding would."""
    at = max(i for i, batch in enumerate(batches) if batch.sample_ids)
    batch = batches[at]
    kept_T = np.arange(len(batch.tokens_T)) < batch.cu_seqlens[-2]
    shorter = replace(batch, loss_weight_T=batch.loss_weight_T * kept_T, sample_ids=batch.sample_ids[:-1])
    return [*batches[:at], shorter, *batches[at + 1 :]]


Damage = Callable[[list[TrainBatch]], list[TrainBatch]]
DAMAGES: dict[str, Damage] = {LOSS_SCALE: _count_twice, DROPPED_SAMPLE: _drop_last, HUNG_RANK: _hang}


def _both(first: Damage, then: Damage) -> Damage:
    return lambda batches: then(first(batches))
