"""Which rank holds which part of which tensor, from config and layout alone, and the proof that nothing is amiss.

The ranks of one pipeline stage are numbered as Megatron numbers them: tensor parallel innermost, then context, then
data parallel. The same ranks are divided once more for the experts: expert-tensor parallel innermost, then expert
parallel, then expert-data parallel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from vime.config.schema import Parallel
from vime.models.spec import ModelSpec, Rule

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of one Megatron tensor.

    hf         Hugging Face names of the whole tensor, in the order they are joined
    shape      of this rank's part (the vocabulary is padded to a multiple of tp)
    dim, of    the whole is split along ``dim`` into ``of`` equal parts; ``dim`` None: every rank holds the whole
    is_expert  the part is that of the expert-tensor-parallel rank, else of the tensor-parallel rank
    is_copy    the tied output layer of the last stage: a copy of the embedding, which belongs to the first
    """

    hf: tuple[str, ...]
    shape: tuple[int, ...]
    dim: int | None = None
    of: int = 1
    is_expert: bool = False
    is_copy: bool = False


@dataclass(frozen=True)
class RankMap:
    """What the global ``ranks``, all alike, hold: global Megatron name -> Part."""

    ranks: tuple[int, ...]
    pp: int
    tp: int
    ep: int
    etp: int
    layers: tuple[tuple[int, ...], ...]
    """Global layer ids per virtual stage."""
    experts: tuple[int, ...]
    """Global expert ids, the same in every layer."""
    tensors: Mapping[str, Part] = field(repr=False)

    def index(self, part: Part) -> int:
        """Which of ``part.of`` equal parts these ranks hold."""
        if part.dim is None:
            return 0
        return self.etp if part.is_expert else self.tp

    def slice(self, part: Part) -> tuple[int, int]:
        """First row (or column) along ``part.dim`` of the whole tensor, and one past the last; (0, 0) if not split."""
        if part.dim is None:
            return 0, 0
        size = part.shape[part.dim]
        return self.index(part) * size, (self.index(part) + 1) * size

    @cached_property
    def num_elements(self) -> int:
        return sum(prod(part.shape) for part in self.tensors.values())


@dataclass(frozen=True)
class MapRow:
    """One line of the table rank -> layers, experts, tensors, elements."""

    ranks: tuple[int, ...]
    place: str
    layers: str
    experts: str
    num_tensors: int
    num_elements: int


@dataclass(frozen=True)
class StaticMap:
    """Every rank's name map. ``problems``: why it is no bijection onto the checkpoint's keys; empty if it is one."""

    spec: ModelSpec
    parallel: Parallel
    ranks: tuple[RankMap, ...] = field(repr=False)
    problems: list[str]

    def of_rank(self, rank: int) -> RankMap:
        return next(found for found in self.ranks if rank in found.ranks)

    def rows(self) -> list[MapRow]:
        return [
            MapRow(
                ranks=found.ranks,
                place=_place(found, self.spec.is_moe),
                layers="; ".join(span(chunk) for chunk in found.layers),
                experts=span(found.experts),
                num_tensors=len(found.tensors),
                num_elements=found.num_elements,
            )
            for found in self.ranks
        ]


def static_map(spec: ModelSpec, parallel: Parallel) -> StaticMap:
    """The map of a layout that divides the model, with what is wrong with it. No weights, no devices."""
    ranks = tuple(rank_maps(spec, parallel))
    return StaticMap(spec, parallel, ranks, prove(spec, parallel, ranks))


# ---------------------------------------------------------------- where layers and experts live


def layer_map(spec: ModelSpec, parallel: Parallel) -> list[list[list[int]]]:
    """``[pp rank][virtual stage]`` -> global layer ids. The layout must have passed ``check_layout``."""
    stages = parallel.vpp or 1
    per_chunk = [count // stages for count in layers_per_rank(spec, parallel)]
    placed: list[list[list[int]]] = [[] for _ in per_chunk]
    at = 0
    for _ in range(stages):
        for rank, count in enumerate(per_chunk):
            placed[rank].append(list(range(at, at + count)))
            at += count
    return placed


def layers_per_rank(spec: ModelSpec, parallel: Parallel) -> list[int]:
    """Number of layers of each pipeline rank."""
    first, last = parallel.num_layers_in_first_stage, parallel.num_layers_in_last_stage
    num_middle = parallel.pp - (first is not None) - (last is not None)
    middle = (spec.num_layers - (first or 0) - (last or 0)) // max(num_middle, 1)
    head, tail = [first] if first is not None else [], [last] if last is not None else []
    return head + [middle] * num_middle + tail


def expert_map(spec: ModelSpec, parallel: Parallel) -> list[list[int]]:
    """``[ep rank]`` -> global expert ids, the same in every layer."""
    here = spec.num_experts // parallel.ep
    return [list(range(rank * here, (rank + 1) * here)) for rank in range(parallel.ep)]


def padded_vocab_size(spec: ModelSpec, tp: int) -> int:
    """Rows of the embedding over all tp ranks: the vocabulary rounded up to a multiple of tp."""
    return -(-spec.vocab_size // tp) * tp


def rank_names(spec: ModelSpec, parallel: Parallel, pp_rank: int) -> dict[str, tuple[str, ...]]:
    """Global Megatron name -> Hugging Face names, for the tensors that pipeline rank ``pp_rank`` owns.

    All experts of its layers are among them. A tied model's output layer on the last stage is a copy of the embedding
    and belongs to the first stage alone.
    """
    layers = [layer for chunk in layer_map(spec, parallel)[pp_rank] for layer in chunk]
    return {
        rule.megatron_of(layer, expert): rule.hf_of(layer, expert)
        for rule, layer, expert in _owned(spec, parallel, pp_rank, layers, range(spec.num_experts))
    }


def _owned(
    spec: ModelSpec, parallel: Parallel, pp_rank: int, layers: Sequence[int], experts: Sequence[int]
) -> Iterator[tuple[Rule, int | None, int | None]]:
    for rule in spec.rules():
        if rule.is_per_layer:
            ids = experts if rule.is_per_expert else [None]
            yield from ((rule, layer, expert) for layer in sorted(layers) for expert in ids)
        elif pp_rank == (0 if rule.megatron == EMBEDDING else parallel.pp - 1):
            yield rule, None, None


# ---------------------------------------------------------------- the map of every rank


def rank_maps(spec: ModelSpec, parallel: Parallel) -> Iterator[RankMap]:
    """One entry for all ranks that hold the same."""
    etp, width = parallel.expert_tp, parallel.world_size // parallel.pp
    alike: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(width):
        alike.setdefault((rank % parallel.tp, rank // etp % parallel.ep, rank % etp), []).append(rank)
    experts = expert_map(spec, parallel)
    for stage, chunks in enumerate(layer_map(spec, parallel)):
        layers = tuple(tuple(chunk) for chunk in chunks)
        held = [_tensors(spec, parallel, stage, layers, ids) for ids in experts]
        for (tp_rank, ep_rank, etp_rank), ranks in alike.items():
            numbers = tuple(stage * width + rank for rank in ranks)
            ids = tuple(experts[ep_rank])
            yield RankMap(numbers, stage, tp_rank, ep_rank, etp_rank, layers, ids, held[ep_rank])


def _tensors(
    spec: ModelSpec, parallel: Parallel, stage: int, layers: Sequence[Sequence[int]], experts: Sequence[int]
) -> dict[str, Part]:
    shapes = {rule.megatron: _local_shape(spec, parallel, rule) for rule in spec.rules()}
    found: dict[str, Part] = {}
    for rule, layer, expert in _owned(spec, parallel, stage, [i for chunk in layers for i in chunk], experts):
        shape, dim, of = shapes[rule.megatron]
        hf = rule.hf_of(layer, expert)
        found[rule.megatron_of(layer, expert)] = Part(hf, shape, dim, of, rule.is_per_expert)
    if spec.is_tied and parallel.pp > 1 and stage == parallel.pp - 1:
        embedding = next(rule for rule in spec.rules() if rule.megatron == EMBEDDING)
        shape, dim, of = shapes[EMBEDDING]
        found[OUTPUT] = Part(embedding.hf_of(None), shape, dim, of, is_copy=True)
    return found


def _local_shape(spec: ModelSpec, parallel: Parallel, rule: Rule) -> tuple[tuple[int, ...], int | None, int]:
    """(shape of one rank's part, dimension that is split, number of parts)."""
    of = parallel.expert_tp if rule.is_per_expert else parallel.tp
    dim = rule.split_dim if of > 1 else None
    shape = list(_whole_shape(spec, parallel, rule))
    if dim is None:
        return tuple(shape), None, 1
    shape[dim] //= of
    return tuple(shape), dim, of


def _whole_shape(spec: ModelSpec, parallel: Parallel, rule: Rule) -> tuple[int, ...]:
    shapes = [spec.shape(axes) for _, axes in rule.parts]
    if rule.parts[0][1][0] == "vocab":
        return (padded_vocab_size(spec, parallel.tp), *shapes[0][1:])
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


# ---------------------------------------------------------------- the proof


def prove(spec: ModelSpec, parallel: Parallel, ranks: Sequence[RankMap]) -> list[str]:
    """Why these maps are no bijection onto the checkpoint's keys with equal shapes; empty if they are one.

    Every tensor of the checkpoint must be owned by one pipeline stage and one Megatron name, its parts must make up the
    whole, and each part must be on as many ranks as the layout has replicas.
    """
    owners: dict[str, tuple[str, int]] = {}
    problems: list[str] = []
    expected = spec.tensors()
    for found in _distinct(ranks):
        problems += _shape_problems(spec, parallel, found, expected)
        for name, part in found.tensors.items():
            if part.is_copy:
                continue
            for hf in part.hf:
                owner = owners.setdefault(hf, (name, found.pp))
                if owner != (name, found.pp):
                    problems.append(f"{hf} is in {owner[0]} of stage {owner[1]} and in {name} of stage {found.pp}")
    problems += [f"{hf} is on no rank" for hf in expected if hf not in owners]
    problems += _replica_problems(parallel, ranks)
    rest = len(problems) - _SHOWN
    return problems[:_SHOWN] + ([f"and {rest} more"] if rest > 0 else [])


def _distinct(ranks: Sequence[RankMap]) -> list[RankMap]:
    """Ranks that share one table of names differ in the numbers of their parts alone."""
    return list({(id(found.tensors), found.pp): found for found in ranks}.values())


def _shape_problems(
    spec: ModelSpec, parallel: Parallel, found: RankMap, expected: Mapping[str, tuple[int, ...]]
) -> list[str]:
    problems = []
    for name, part in found.tensors.items():
        unknown = [hf for hf in part.hf if hf not in expected]
        if unknown:
            problems.append(f"{unknown[0]} (in {name} of rank {found.ranks[0]}) is no tensor of the checkpoint")
            continue
        shapes = [expected[hf] for hf in part.hf]
        rows = sum(shape[0] for shape in shapes)
        if name in (EMBEDDING, OUTPUT):
            rows = padded_vocab_size(spec, parallel.tp)
        whole = [part.shape[i] * (part.of if i == part.dim else 1) for i in range(len(part.shape))]
        if whole != [rows, *shapes[0][1:]]:
            problems.append(
                f"{name} on rank {found.ranks[0]}: {part.of} parts of {list(part.shape)} along {part.dim} make up "
                f"{whole}, the checkpoint has {[rows, *shapes[0][1:]]} ({', '.join(part.hf)})"
            )
    return problems


def _replica_problems(parallel: Parallel, ranks: Sequence[RankMap]) -> list[str]:
    """Each part of each tensor on as many ranks as the layout has replicas of it."""
    width = parallel.world_size // parallel.pp
    counts: dict[tuple[int, int, int], int] = {}
    tables: dict[int, Mapping[str, Part]] = {}
    for found in ranks:  # ranks with one table: how many hold part i of the dense tensors, and of the experts
        tables[id(found.tensors)] = found.tensors
        for is_expert, index in ((0, found.tp), (1, found.etp)):
            key = (id(found.tensors), is_expert, index)
            counts[key] = counts.get(key, 0) + len(found.ranks)
    held: dict[tuple[str, int, int | None], dict[int, int]] = {}
    for table, tensors in tables.items():
        of_kind = [
            {index: n for (at, kind, index), n in counts.items() if at == table and kind == is_expert}
            for is_expert in (0, 1)
        ]
        for name, part in tensors.items():
            here = of_kind[part.is_expert] if part.dim is not None else {0: sum(of_kind[0].values())}
            total = held.setdefault((name, part.of, part.dim), {})
            for index, n in here.items():
                total[index] = total.get(index, 0) + n
    problems = []
    for (name, of, dim), by_index in held.items():
        copies = width // (parallel.ep if ".experts." in name else 1) // of
        wanted = dict.fromkeys(range(of), copies)
        if by_index != wanted:
            along = "whole" if dim is None else f"in {of} parts along {dim}"
            problems.append(f"{name}, {along}: part -> ranks is {by_index}, must be {wanted}")
    return problems


def _place(found: RankMap, is_moe: bool) -> str:
    return f"pp {found.pp}, tp {found.tp}" + (f", ep {found.ep}, etp {found.etp}" if is_moe else "")


def span(numbers: Sequence[int]) -> str:
    """``0-3``, ``5``, or nothing; consecutive numbers."""
    if not numbers:
        return ""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
