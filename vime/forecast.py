"""How much memory each process will hold, from shapes alone.

Weights, gradients and optimizer are exact up to padding. Activations are an estimate. The KV cache is that of a CPU
engine; on a GPU vLLM fills what ``vllm.gpu_memory_utilization`` allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from vime.backends.vllm.arguments import DEFAULT_MAX_NUM_SEQS, kv_cache_bytes, max_model_len, read_model_config
from vime.config.schema import Config
from vime.models import ModelSpec
from vime.models.placement import rank_maps

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ForecastRow:
    """Bytes of one kind of process. ``count`` processes are alike."""

    process: str
    count: int
    weights: int
    gradients: int = 0
    optimizer: int = 0
    reference: int = 0
    activations: int = 0
    kv_cache: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.reference + self.activations + self.kv_cache


def forecast(config: Config, spec: ModelSpec) -> list[ForecastRow]:
    """One row per pipeline stage of the trainer and one for the engines. The layout must be possible."""
    rows = [_trainer(config, spec, stage) for stage in range(config.parallel.pp)] if config.needs_trainer else []
    return rows + ([_engine(config, spec)] if config.needs_engines else [])


def _trainer(config: Config, spec: ModelSpec, stage: int) -> ForecastRow:
    p, size = config.parallel, BYTES[config.model.dtype]
    numel, experts = stage_parameters(config, spec, stage)
    # Adam: two moments in float32, and a float32 master copy where the weights are in another type
    state = 8 if size == 4 else 12
    return ForecastRow(
        process=f"trainer, stage {stage}",
        count=p.world_size // p.pp,
        weights=numel * size,
        gradients=numel * 4,  # summed in float32
        optimizer=_optimizer(config, numel - experts, experts) * state,
        reference=numel * size if config.uses_reference else 0,
        activations=_activations(config, spec, stage),
    )


def _optimizer(config: Config, dense: int, experts: int) -> int:
    """Parameters whose optimizer state a rank holds; a sharded one is split over the ranks that hold the same."""
    p = config.parallel
    if not p.distributed_optimizer:
        return dense + experts
    replicas = p.world_size // p.pp // (p.ep * p.expert_tp)
    return dense // (p.dp * p.cp) + experts // replicas


def stage_parameters(config: Config, spec: ModelSpec, stage: int) -> tuple[int, int]:
    """(parameters of one rank of a pipeline stage, how many of them are experts'); all its ranks hold as many.

    The last stage of a tied model holds a copy of the embedding.
    """
    held = next(found for found in rank_maps(spec, config.parallel) if found.pp == stage)
    experts = sum(prod(part.shape) for part in held.tensors.values() if part.is_expert)
    return held.num_elements, experts


def _local(spec: ModelSpec, name: str, shape: tuple[int, ...], tp: int) -> int:
    """Matrices and biases are split over tp, norms and routers are not; key/value heads at most down to one each."""
    if (len(shape) == 1 and not name.endswith(".bias")) or name.endswith(".mlp.gate.weight"):
        return prod(shape)
    if ".k_proj." in name or ".v_proj." in name:
        tp = min(tp, spec.num_query_groups)
    return -(-prod(shape) // tp)


def _activations(config: Config, spec: ModelSpec, stage: int) -> int:
    """Kept for the backward pass of one micro-batch, times the micro-batches a stage has in flight (1F1B)."""
    p, size = config.parallel, BYTES[config.model.dtype]
    tokens = -(-config.train.max_tokens_per_micro_batch // p.cp)
    heads = spec.num_attention_heads * spec.head_dim
    groups = spec.num_query_groups * spec.head_dim
    split = p.tp if p.sequence_parallel else 1
    # of experts, what a token takes to each of its few, on average over the ranks
    wide = 4 * spec.ffn_hidden_size
    if spec.is_moe:
        wide = spec.num_experts_per_token * (4 * spec.expert_ffn_hidden_size + 2 * spec.hidden_size)
    per_layer = 6 * spec.hidden_size // split + (3 * heads + 2 * groups + wide) // p.tp
    num_layers = spec.num_layers / p.pp
    in_flight = p.pp - stage
    # logits, their softmax and their gradient, in float32, of the one micro-batch that is at the end
    logits = 3 * 4 * tokens * spec.vocab_size // p.tp if stage == p.pp - 1 else 0
    return int(tokens * per_layer * num_layers * size * in_flight) + logits


def _engine(config: Config, spec: ModelSpec) -> ForecastRow:
    tp, size = config.rollout.engine_tp, BYTES[config.model.dtype]
    weights = sum(_local(spec, name, shape, tp) for name, shape in spec.tensors().items()) * size
    model = read_model_config(config.model.path)
    num_seqs = int(config.vllm.get("max_num_seqs", DEFAULT_MAX_NUM_SEQS))
    kv_cache = config.vllm.get("kv_cache_memory_bytes") or kv_cache_bytes(
        model, max_model_len(config, model), num_seqs, config.model.dtype, tp
    )
    return ForecastRow("engine", config.rollout.num_engines * tp, weights, kv_cache=int(kv_cache))
