"""Where a model's tensors live under a parallel layout, and which layouts are possible. Arithmetic only."""

from __future__ import annotations

from collections import Counter

from vime.config.schema import Parallel
from vime.models.spec import ModelSpec, layer_of


def layer_map(spec: ModelSpec, parallel: Parallel) -> list[list[list[int]]]:
    """``[pp rank][virtual stage]`` -> global layer ids. The layout must have passed ``check_layout``."""
    stages = parallel.vpp or 1
    per_chunk = [count // stages for count in _layers_per_rank(spec, parallel)]
    placed: list[list[list[int]]] = [[] for _ in per_chunk]
    at = 0
    for _ in range(stages):
        for rank, count in enumerate(per_chunk):
            placed[rank].append(list(range(at, at + count)))
            at += count
    return placed


def rank_names(spec: ModelSpec, parallel: Parallel, pp_rank: int) -> dict[str, tuple[str, ...]]:
    """Global Megatron name -> Hugging Face names, for the tensors that pipeline rank ``pp_rank`` owns.

    A tied model's output layer on the last stage is a copy of the embedding and belongs to the first stage alone.
    """
    layers = {layer for chunk in layer_map(spec, parallel)[pp_rank] for layer in chunk}
    is_last = pp_rank == parallel.pp - 1

    def is_here(name: str) -> bool:
        layer = layer_of(name)
        if layer is not None:
            return layer in layers
        return pp_rank == 0 if name.startswith("embedding.") else is_last

    return {name: hf for name, hf in spec.megatron_names().items() if is_here(name)}


def check_layout(spec: ModelSpec, parallel: Parallel) -> list[str]:
    """Problems of this layout for this model, one line each; empty if it is possible."""
    problems = _tensor_problems(spec, parallel) + _pipeline_problems(spec, parallel)
    return problems or _map_problems(spec, parallel)


def _layers_per_rank(spec: ModelSpec, parallel: Parallel) -> list[int]:
    first, last = parallel.num_layers_in_first_stage, parallel.num_layers_in_last_stage
    num_middle = parallel.pp - (first is not None) - (last is not None)
    middle = (spec.num_layers - (first or 0) - (last or 0)) // max(num_middle, 1)
    head, tail = [first] if first is not None else [], [last] if last is not None else []
    return head + [middle] * num_middle + tail


def _tensor_problems(spec: ModelSpec, parallel: Parallel) -> list[str]:
    tp, problems = parallel.tp, []
    for name, count in [("num_attention_heads", spec.num_attention_heads), ("ffn_hidden_size", spec.ffn_hidden_size)]:
        if count % tp:
            problems.append(f"parallel.tp = {tp}: does not divide {name} = {count} ({_try(spec.num_attention_heads)})")
    groups = spec.num_query_groups
    if groups % tp and tp % groups:
        problems.append(
            f"parallel.tp = {tp}: neither divides nor is a multiple of the key/value heads = {groups} ({_try(groups)})"
        )
    if parallel.sequence_parallel and tp == 1:
        problems.append("parallel.sequence_parallel = True: needs parallel.tp > 1 (there is nothing to split over)")
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
    counts = _layers_per_rank(spec, parallel)
    return [
        f"parallel.vpp = {vpp}: does not divide the {count} layers of pipeline stage {rank} ({_try(count)})"
        for rank, count in enumerate(counts)
        if count % vpp
    ][:1]


def _map_problems(spec: ModelSpec, parallel: Parallel) -> list[str]:
    """Every tensor of the checkpoint on exactly one pipeline stage."""
    owned = Counter(
        hf for rank in range(parallel.pp) for names in rank_names(spec, parallel, rank).values() for hf in names
    )
    expected = spec.tensors().keys()
    wrong = [f"{name} is on no pipeline stage" for name in expected if name not in owned]
    wrong += [f"{name} is on {count} pipeline stages" for name, count in owned.items() if count > 1]
    wrong += [f"{name} is no tensor of the checkpoint" for name in owned if name not in expected]
    return [f"parallel: {line}" for line in wrong[:10]]


def _try(number: int) -> str:
    return "try " + ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
