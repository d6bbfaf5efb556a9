"""Which parallel layouts a model can have; ``placement`` says where its tensors then live. Arithmetic only."""

from __future__ import annotations

from vime.config.schema import Parallel
from vime.models.placement import StaticMap, layer_map, layers_per_rank, rank_names, static_map
from vime.models.spec import ModelSpec

__all__ = ["StaticMap", "check_layout", "layer_map", "rank_names", "static_map"]


def check_layout(spec: ModelSpec, parallel: Parallel) -> list[str]:
    """Problems of this layout for this model, one line each; empty if it is possible."""
    problems = _tensor_problems(spec, parallel) + _expert_problems(spec, parallel)
    problems += _pipeline_problems(spec, parallel)
    return problems or [f"parallel: {line}" for line in static_map(spec, parallel).problems]


def _tensor_problems(spec: ModelSpec, parallel: Parallel) -> list[str]:
    tp, problems = parallel.tp, []
    sizes = [("num_attention_heads", spec.num_attention_heads)]
    sizes += [] if spec.is_moe else [("ffn_hidden_size", spec.ffn_hidden_size)]
    for name, count in sizes:
        if count % tp:
            problems.append(f"parallel.tp = {tp}: does not divide {name} = {count} ({_try(spec.num_attention_heads)})")
    groups = spec.num_query_groups
    if groups % tp and tp % groups:
        problems.append(
            f"parallel.tp = {tp}: neither divides nor is a multiple of the key/value heads = {groups} ({_try(groups)})"
        )
    rows = (spec.num_attention_heads + 2 * groups) * spec.head_dim
    if not problems and rows % tp:
        problems.append(f"parallel.tp = {tp}: does not divide the {rows} rows of query, key and value ({_try(groups)})")
    if parallel.sequence_parallel and tp == 1:
        problems.append("parallel.sequence_parallel = True: needs parallel.tp > 1 (there is nothing to split over)")
    return problems


def _expert_problems(spec: ModelSpec, parallel: Parallel) -> list[str]:
    ep, etp, num_ranks = parallel.ep, parallel.expert_tp, parallel.world_size // parallel.pp
    if not spec.is_moe:
        given = [f"parallel.ep = {ep}"] if ep > 1 else []
        given += [f"parallel.etp = {parallel.etp}"] if parallel.etp not in (None, parallel.tp) else []
        return [f"{line}: {spec.family} has no experts to split" for line in given]
    problems = []
    if parallel.tp > 1 and not parallel.sequence_parallel:
        problems.append(
            f"parallel.tp = {parallel.tp}: a model of experts needs parallel.sequence_parallel = true with it (else "
            "every rank would train all tokens through its experts)"
        )
    if spec.num_experts % ep:
        problems.append(
            f"parallel.ep = {ep}: does not divide num_experts = {spec.num_experts} ({_try(spec.num_experts)})"
        )
    if spec.expert_ffn_hidden_size % etp:
        size = spec.expert_ffn_hidden_size
        problems.append(f"parallel.etp = {etp}: does not divide moe_intermediate_size = {size} ({_try(size)})")
    if num_ranks % (ep * etp):
        problems.append(
            f"parallel.ep x etp = {ep} x {etp}: does not divide tp x cp x dp = {num_ranks} "
            "(the ranks of a stage are shared by the experts)"
        )
    return problems


def _pipeline_problems(spec: ModelSpec, parallel: Parallel) -> list[str]:
    pp, layers = parallel.pp, spec.num_layers
    uneven = {
        "num_layers_in_first_stage": parallel.num_layers_in_first_stage,
        "num_layers_in_last_stage": parallel.num_layers_in_last_stage,
    }
    given = {name: count for name, count in uneven.items() if count is not None}
    if pp == 1:
        problems = [f"parallel.{name} = {count}: needs parallel.pp > 1" for name, count in given.items()]
        if parallel.vpp is not None:
            problems.append(f"parallel.vpp = {parallel.vpp}: needs parallel.pp > 1")
        return problems
    if not given and layers % pp:
        return [f"parallel.pp = {pp}: does not divide num_layers = {layers} ({_try(layers)}, or set uneven stages)"]
    num_middle, rest = pp - len(given), layers - sum(given.values())
    spelled = ", ".join(f"parallel.{name} = {count}" for name, count in given.items())
    if rest < num_middle or (num_middle == 0 and rest) or (num_middle and rest % num_middle):
        return [f"{spelled}: leaves {rest} of num_layers = {layers} layers for {num_middle} other stages"]
    return _virtual_problems(spec, parallel)


def _virtual_problems(spec: ModelSpec, parallel: Parallel) -> list[str]:
    vpp = parallel.vpp
    if vpp is None:
        return []
    if vpp == 1:
        return ["parallel.vpp = 1: is no interleaving (leave it out, or take 2 or more)"]
    counts = layers_per_rank(spec, parallel)
    return [
        f"parallel.vpp = {vpp}: does not divide the {count} layers of pipeline stage {rank} ({_try(count)})"
        for rank, count in enumerate(counts)
        if count % vpp
    ][:1]


def _try(number: int) -> str:
    return "try " + ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
