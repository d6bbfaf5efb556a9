"""Faults that ``vime align-check`` plants in a live trainer rank, each with what undoes it.

A fault of the code (a kernel, a router, a scale) is in the policy and in the reference alike, as it would be. Weights,
optimizer and reference need no undoing here: ``MegatronRank.restart`` brings them back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from vime.align.export_faults import EXPORT_FAULTS
from vime.align.faults import require
from vime.backends.megatron import faults, weights
from vime.backends.megatron.build import Model
from vime.errors import UsageError
from vime.types import StepStats, TrainBatch, TrainData

if TYPE_CHECKING:
    from vime.backends.megatron.rank import MegatronRank

NOISE = 1e-6
BIAS = 0.5
LEAK_BYTES = 20_000_000
PREFERRED = 3
"""The expert that a biased router prefers."""
Undo = Callable[[], None]


def plant(rank: MegatronRank, fault: str) -> tuple[str, list[Undo]]:
    """Plant ``fault``; returns what was changed, in words, and what undoes it, to be called in reverse order.

    A collective. UsageError for a name that is no fault of a trainer, or where model or layout have no place for it.
    """
    if fault in EXPORT_FAULTS:
        return _in_export(rank, fault)
    if fault not in PLANTERS:
        known = ", ".join([*PLANTERS, *EXPORT_FAULTS])
        raise UsageError(f"{fault!r} is no fault of a trainer", f"known: {known}")
    require(fault, rank.config)
    return PLANTERS[fault](rank)


def _replaced(owner: Any, name: str, value: Any) -> Undo:
    """Shadow a method of ``owner`` by ``value``."""
    setattr(owner, name, value)
    return lambda: delattr(owner, name)


def _models(rank: MegatronRank) -> Iterator[tuple[str, Model]]:
    yield "policy", rank.policy
    if rank.reference is not None:
        yield "reference", rank.reference


def _layers(rank: MegatronRank) -> list[tuple[int, Any]]:
    """Of policy and reference, (number from 0, the layer in the middle of the first pipeline stage)."""
    if parallel_state.get_pipeline_model_parallel_rank() != 0:
        return []
    found = []
    for _, model in _models(rank):
        layers = model.modules[0].decoder.layers
        layer = layers[len(layers) // 2]
        found.append((layer.layer_number - 1, layer))
    return found


def _number(layers: list[tuple[int, Any]]) -> str:
    return f"layer {layers[0][0]}" if layers else "a layer of the first stage"


# ---------------------------------------------------------------- weights


def _shard_order(rank: MegatronRank) -> tuple[str, list[Undo]]:
    for _, model in _models(rank):
        faults.plant_in_weights(model, [faults.SHARD_ORDER])
    rank.learner.adopt_weights()
    return "tensor-parallel ranks exchanged their shards of the attention output of layer 0", []


@torch.no_grad()
def _unloaded(rank: MegatronRank) -> tuple[str, list[Undo]]:
    """A norm's weight: its initial value is known without having been kept."""
    name = ""
    for _, model in _models(rank):
        held = dict(weights.named_parameters(model))
        norms = [each for each in held if each.endswith(("norm.weight", "layer_norm_weight"))]
        if parallel_state.get_pipeline_model_parallel_rank() == 0:
            name = norms[len(norms) // 2]
            held[name].fill_(1.0)
    rank.learner.adopt_weights()
    return f"{name} is 1 everywhere, as it was before loading", []


# ---------------------------------------------------------------- forward


def _one_sided_temperature(rank: MegatronRank) -> tuple[str, list[Undo]]:
    own = rank.config
    sampling = own.rollout.sampling.model_copy(update={"temperature": 1.0})
    changed = own.model_copy(update={"rollout": own.rollout.model_copy(update={"sampling": sampling})})
    rank.use(changed)
    return f"the trainer divides logits by 1, the engine by {own.rollout.sampling.temperature:g}", [
        lambda: rank.use(own)
    ]


def _noisy_kernel(rank: MegatronRank) -> tuple[str, list[Undo]]:
    generator = torch.Generator().manual_seed(1 + rank.rank)

    def disturb(module: Any, inputs: Any, output: Any) -> Any:
        first, *rest = output
        noise = torch.randn(first.shape, generator=generator).to(first)
        return (first + NOISE * noise, *rest)

    layers = _layers(rank)
    hooks = [layer.self_attention.linear_proj.register_forward_hook(disturb) for _, layer in layers]
    said = f"the attention output of {_number(layers)} carries fresh noise of {NOISE:g} at every forward"
    return said, [hook.remove for hook in hooks]


def _router_bias(rank: MegatronRank) -> tuple[str, list[Undo]]:
    layers = [(n, layer) for n, layer in _layers(rank) if hasattr(layer.mlp, "router")]
    if not layers and parallel_state.get_pipeline_model_parallel_rank() == 0:
        raise UsageError(f"router-bias: {rank.spec.family} has no router", "take a mixture of experts")
    undo = [_biased(layer.mlp.router) for _, layer in layers]
    return f"the router of {_number(layers)} adds {BIAS:g} to expert {PREFERRED}", undo


def _biased(router: Any) -> Undo:
    original = router.gating

    def gating(hidden: torch.Tensor) -> torch.Tensor:
        logits = original(hidden)
        bias = torch.zeros(logits.shape[-1], dtype=logits.dtype, device=logits.device)
        bias[PREFERRED] = BIAS
        return logits + bias

    return _replaced(router, "gating", gating)


def _packed_leak(rank: MegatronRank) -> tuple[str, list[Undo]]:
    """Positions are those of each sequence, as always: it is the attention alone that sees too much."""

    def without_ends(module: Any, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        packed = options["packed_seq_params"]
        ends = packed.cu_seqlens_q[[0, -1]]
        longest = int(ends[-1])
        options["packed_seq_params"] = replace(
            packed, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
        )
        return inputs, options

    layers = _layers(rank)
    hooks = [
        layer.self_attention.core_attention.register_forward_pre_hook(without_ends, with_kwargs=True)
        for _, layer in layers
    ]
    return f"attention of {_number(layers)} takes the pack for one sequence", [hook.remove for hook in hooks]


# ---------------------------------------------------------------- step


def _damaged(name: str) -> Callable[[MegatronRank], tuple[str, list[Undo]]]:
    def of_rank_1(rank: MegatronRank) -> tuple[str, list[Undo]]:
        before = rank.learner.damage
        faults.plant_in_steps(rank.learner, [name])
        return f"{name} in data-parallel rank {faults.RANK}", [lambda: setattr(rank.learner, "damage", before)]

    return of_rank_1


def _wrong_normalizer(rank: MegatronRank) -> tuple[str, list[Undo]]:
    before = rank.learner.damage
    rank.learner.damage = _by_own_tokens
    said = "every data-parallel rank divides by its own tokens, then the ranks are averaged"
    return said, [lambda: setattr(rank.learner, "damage", before)]


def _by_own_tokens(batches: list[TrainBatch]) -> list[TrainBatch]:
    group = parallel_state.get_data_parallel_group()
    own = sum(float(batch.loss_weight_T.sum()) for batch in batches)
    total = torch.tensor([own], dtype=torch.float64)
    dist.all_reduce(total, group=group)
    scale = float(total) / (group.size() * own) if own else 1.0
    return [replace(batch, loss_weight_T=(scale * batch.loss_weight_T).astype("float32")) for batch in batches]


def _memory_leak(rank: MegatronRank) -> tuple[str, list[Undo]]:
    kept: list[torch.Tensor] = []
    step = rank.step

    def leaking(data: TrainData) -> StepStats:
        kept.append(torch.ones(LEAK_BYTES, dtype=torch.uint8))
        return step(data)

    return f"{LEAK_BYTES / 1e6:.0f} MB are kept at every step", [kept.clear, _replaced(rank, "step", leaking)]


def _moved_reference(rank: MegatronRank) -> tuple[str, list[Undo]]:
    reference = rank.reference
    if reference is None:
        raise UsageError("moved-reference: this trainer has no reference", "algo.log_ref = true keeps one")
    load = rank.load

    @torch.no_grad()
    def loading(path: str) -> dict[str, Any]:
        state = load(path)
        pairs = zip(weights.named_parameters(reference), weights.named_parameters(rank.policy), strict=True)
        for (_, mine), (_, policy) in pairs:
            mine.copy_(policy)
        return state

    return "loading a checkpoint copies the policy into the reference", [_replaced(rank, "load", loading)]


# ---------------------------------------------------------------- export


def _in_export(rank: MegatronRank, fault: str) -> tuple[str, list[Undo]]:
    """Every rank iterates over the same stream, so that the collectives of the export agree."""
    damage, original = EXPORT_FAULTS[fault], rank.named_weights
    damage.check(rank.spec)

    def named_weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(damage.apply(rank.spec, original()))  # all of it: who reads may stop at what is wrong

    return damage.says(rank.spec), [_replaced(rank, "named_weights", named_weights)]


PLANTERS: dict[str, Callable[[Any], tuple[str, list[Undo]]]] = {
    faults.LOSS_SCALE: _damaged(faults.LOSS_SCALE),
    faults.DROPPED_SAMPLE: _damaged(faults.DROPPED_SAMPLE),
    faults.HUNG_RANK: _damaged(faults.HUNG_RANK),
    faults.SHARD_ORDER: _shard_order,
    "unloaded-tensor": _unloaded,
    "one-sided-temperature": _one_sided_temperature,
    "noisy-kernel": _noisy_kernel,
    "router-bias": _router_bias,
    "packed-leak": _packed_leak,
    "wrong-normalizer": _wrong_normalizer,
    "memory-leak": _memory_leak,
    "moved-reference": _moved_reference,
}
