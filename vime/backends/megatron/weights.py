"""Weights in and out under their Hugging Face names: nothing lost, nothing guessed.

Loading: every tensor of the folder and every parameter of the model is accounted for, else VimeError. Export: full
tensors in one order on all ranks. The table of names and shapes is ``vime.models``; how a parameter is split over
tensor-parallel ranks is read off the parameter itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from vime import device
from vime.backends.megatron.build import Model
from vime.errors import VimeError
from vime.models import ModelSpec, expert_of, rank_names, static_map
from vime.models import hf_names as table_names
from vime.models.placement import padded_vocab_size
from vime.weights.checkpoint import shard_files

OUTPUT, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
_VOCAB_NAMES = (OUTPUT, EMBEDDING)
_BUFFERS = re.compile(r"rotary_emb\.inv_freq$")  # old Llama folders hold this buffer; it follows from config.json
_SHOWN = 10


@dataclass(frozen=True)
class Accounting:
    """What loading one folder did, in counts of Hugging Face tensors."""

    path: str
    num_loaded: int
    num_expected: int
    ignored: tuple[str, ...]
    casts: tuple[str, ...]

    def lines(self) -> list[str]:
        lines = [f"{self.path}: {self.num_loaded} of {self.num_expected} tensors loaded, 0 missing, 0 unexpected"]
        lines += [f"{self.path}: cast {cast}" for cast in self.casts]
        if self.ignored:
            lines.append(f"{self.path}: {len(self.ignored)} buffers ignored: {', '.join(self.ignored[:_SHOWN])}")
        return lines


def named_parameters(model: Model) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Global Megatron name and parameter of everything this rank holds, a tied output layer's copy included."""
    for module in model.modules:
        for local_name, parameter in module.named_parameters():
            name = local_name
            if found := re.match(r"decoder\.layers\.(\d+)\.(.*)", local_name):
                rest = _global_expert(model, found[2])
                name = f"decoder.layers.{module.decoder.layers[int(found[1])].layer_number - 1}.{rest}"
            yield name, parameter


_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12])\.weight|(linear_fc[12])\.weight(\d+))$")


def _global_expert(model: Model, name: str) -> str:
    """An expert's name as grouped experts have it, with its global number: this rank's own are counted from 0."""
    found = _EXPERT.match(name)
    if found is None:
        return name
    first = parallel_state.get_expert_model_parallel_rank() * (model.spec.num_experts // model.parallel.ep)
    return f"mlp.experts.{found[2] or found[3]}.weight{first + int(found[1] or found[4])}"


def check_map(model: Model) -> None:
    """Raise VimeError where this rank does not hold exactly what the static map of the layout says."""
    wanted = static_map(model.spec, model.parallel).of_rank(dist.get_rank())
    held = {name: tuple(parameter.shape) for name, parameter in named_parameters(model)}
    expected = {name: part.shape for name, part in wanted.tensors.items()}
    wrong = [f"{name} is not there" for name in expected if name not in held]
    wrong += [f"{name} is not expected" for name in held if name not in expected]
    wrong += [f"{name} is {list(held[name])}, not {list(s)}" for name, s in expected.items() if held.get(name, s) != s]
    if wrong:
        raise VimeError(
            f"trainer rank {dist.get_rank()}: Megatron built other tensors than the layout's map says: "
            + "; ".join(wrong[:_SHOWN]),
            "install the megatron-core version pinned by vime",
        )


# ---------------------------------------------------------------- in


class Folder:
    """The *.safetensors files of a Hugging Face folder, checked against a model before anything is read."""

    def __init__(self, path: str) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        files = shard_files(Path(path))
        if not files:
            raise VimeError(f"{path}: no *.safetensors file there", "model.path must be a complete Hugging Face folder")
        self._of: dict[str, Any] = {}
        for file in files:
            try:
                handle = safe_open(file, "pt")
            except (SafetensorError, OSError) as error:
                raise VimeError(f"{file}: cannot be read ({error})", "copy the file again") from error
            if twice := sorted(self._of.keys() & set(handle.keys())):
                raise VimeError(f"{file}: {_listed('in another file too', twice)}", "leave one file of each tensor")
            self._of.update(dict.fromkeys(handle.keys(), handle))

    def names(self) -> set[str]:
        return set(self._of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._of[name].get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        return self._of[name].get_tensor(name)

    def check(self, spec: ModelSpec) -> tuple[str, ...]:
        """Names that may be ignored. Raises VimeError listing missing and unexpected names and wrong shapes."""
        expected, found = spec.tensors(), self.names()
        ignored = sorted(name for name in found if _BUFFERS.search(name))
        if spec.is_tied and "lm_head.weight" in found and self._repeats_embedding():
            ignored.append("lm_head.weight")
        missing = [name for name in expected if name not in found]
        unexpected = sorted(found - expected.keys() - set(ignored))
        shapes = [
            f"{name} is {list(self.shape(name))}, config.json says {list(shape)}"
            for name, shape in expected.items()
            if name in found and self.shape(name) != shape
        ]
        problems = [_listed("missing", missing), _listed("unexpected", unexpected), _listed("wrong shape", shapes)]
        if any(problems):
            raise VimeError(
                f"{self.path}: the weights do not fit {spec.family} of config.json\n"
                + "\n".join(filter(None, problems)),
                "the folder is incomplete, or its config.json belongs to another model",
            )
        return tuple(ignored)

    def _repeats_embedding(self) -> bool:
        embedding = "model.embed_tokens.weight"
        return embedding in self._of and torch.equal(self.tensor("lm_head.weight"), self.tensor(embedding))


def _listed(what: str, names: list[str]) -> str:
    rest = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{what} ({len(names)}): {', '.join(names[:_SHOWN])}{rest}" if names else ""


@torch.no_grad()
def load(model: Model, path: str) -> Accounting:
    """Copy a Hugging Face folder into the model. No collective but a count over pipeline and experts.

    Raises VimeError listing the first ten names of each kind if anything is missing, unexpected or of a wrong shape.
    """
    check_map(model)
    folder = Folder(path)
    ignored = folder.check(model.spec)
    loaded: set[str] = set()
    casts: set[str] = set()
    for name, parameter in named_parameters(model):
        sources = _sources(model.spec, name)
        parts = [folder.tensor(source) for source in sources]
        shard = _shard(model, name, parts, parameter)
        if shard.shape != parameter.shape:
            raise VimeError(f"{path}: {name} is {list(shard.shape)} after splitting, not {list(parameter.shape)}")
        casts.update(f"{_short(p.dtype)} -> {_short(parameter.dtype)}" for p in parts if p.dtype != parameter.dtype)
        parameter.copy_(shard)
        loaded.update(sources)
    everywhere = _union(loaded)
    if left := sorted(model.spec.tensors().keys() - everywhere):
        raise VimeError(f"{path}: no pipeline stage loaded {_listed('these', left)}")
    return Accounting(path, len(everywhere), len(model.spec.tensors()), ignored, tuple(sorted(casts)))


def in_files(model: Model, folder: Folder, name: str, parameter: torch.nn.Parameter) -> tuple[tuple[str, ...], Tensor]:
    """(Hugging Face names, this rank's part in the parameter's type) of what ``folder`` has for a parameter."""
    sources = _sources(model.spec, name)
    return sources, _shard(model, name, [folder.tensor(each) for each in sources], parameter).to(parameter.dtype)


def _sources(spec: ModelSpec, name: str) -> tuple[str, ...]:
    if spec.is_tied and name == OUTPUT:  # with a pipeline the last stage holds a copy of the embedding
        return table_names(EMBEDDING)
    return table_names(name)


def _shard(model: Model, name: str, parts: list[Tensor], parameter: torch.nn.Parameter) -> Tensor:
    """This rank's part of the Megatron tensor that ``parts`` make up."""
    group = _split_group(name)
    size, rank = group.size(), group.rank()
    if name in _VOCAB_NAMES:
        num_padding = padded_vocab_size(model.spec, model.parallel.tp) - parts[0].shape[0]
        parts = [torch.nn.functional.pad(parts[0], (0, 0, 0, num_padding))]
    dim = _split_dim(name, parameter)
    if size == 1 or dim is None:
        return fuse(model.spec, parts)
    if len(parts) == 2:  # every rank holds its part of the gate, then its part of the up projection
        return torch.cat([part.chunk(size)[rank] for part in parts])
    return fuse(model.spec, parts).chunk(size, dim)[rank]


def _split_group(name: str) -> dist.ProcessGroup:
    """The ranks that share a tensor: an expert's are the expert-tensor-parallel ones."""
    if expert_of(name) is None:
        return parallel_state.get_tensor_model_parallel_group()
    return parallel_state.get_expert_tensor_parallel_group()


def _split_dim(name: str, parameter: torch.nn.Parameter) -> int | None:
    """Dimension split over the ranks of ``_split_group``, None where every rank holds the whole."""
    if expert_of(name) is not None:  # grouped experts carry no marks
        return 1 if ".linear_fc2." in name else 0
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


def fuse(spec: ModelSpec, parts: list[Tensor]) -> Tensor:
    """Hugging Face parts -> full Megatron tensor: copy, gate over up, or q, k, v interleaved per key/value head."""
    if len(parts) == 3:
        groups = [part.reshape(spec.num_query_groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(groups, 1).flatten(0, 1)
    return torch.cat(parts) if len(parts) == 2 else parts[0]


def split(spec: ModelSpec, full: Tensor, num_parts: int) -> list[Tensor]:
    """Inverse of ``fuse``."""
    if num_parts == 3:
        per_group = spec.num_attention_heads // spec.num_query_groups * spec.head_dim
        grouped = full.reshape(spec.num_query_groups, -1, *full.shape[1:])
        return [part.flatten(0, 1) for part in grouped.split([per_group, spec.head_dim, spec.head_dim], 1)]
    return list(full.chunk(2)) if num_parts == 2 else [full]


def _union(names: set[str]) -> set[str]:
    """Of all expert-parallel ranks and pipeline stages."""
    for group in (
        parallel_state.get_expert_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    ):
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, sorted(names), group=group)
        names = {name for part in gathered for name in part}
    return names


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------- out


def order(model: Model) -> Iterator[tuple[str, int]]:
    """(Hugging Face name, pipeline stage that owns it) in the order of ``export``. No collective."""
    for stage in range(model.parallel.pp):
        for names in rank_names(model.spec, model.parallel, stage).values():
            yield from ((name, stage) for name in names)


@torch.no_grad()
def export(
    model: Model, value: Callable[[torch.nn.Parameter], Tensor] = lambda parameter: parameter.data
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor on the CPU) of the whole model; the same tensors in the same order on all ranks.

    A collective: every rank must iterate to the end. ``value`` reads something of the parameter's shape, the gradient
    for instance. Tensors are contiguous copies; padding rows of the vocabulary are cut off.
    """
    local = dict(named_parameters(model))
    dtype = value(next(iter(local.values()))).dtype
    group = parallel_state.get_pipeline_model_parallel_group()
    shapes = model.spec.tensors()
    for stage in range(group.size()):
        source = dist.get_global_rank(group, stage)
        for name, names in rank_names(model.spec, model.parallel, stage).items():
            if name in local and stage == group.rank():
                full = _gather(model.spec, name, local[name], value, len(names)).contiguous()
            else:
                full = torch.empty(_fused_shape([shapes[n] for n in names]), dtype=dtype, device=device.current())
            if stage == group.rank():
                _spread_expert(model, name, full)
            if group.size() > 1:
                dist.broadcast(full, src=source, group=group)
            for hf_name, part in zip(names, split(model.spec, full, len(names)), strict=True):
                yield hf_name, part.to("cpu", copy=True).contiguous()


def _gather(
    spec: ModelSpec,
    name: str,
    parameter: torch.nn.Parameter,
    value: Callable[[torch.nn.Parameter], Tensor],
    num_parts: int,
) -> Tensor:
    """Full Megatron tensor from all ranks that share it, without vocabulary padding."""
    group = _split_group(name)
    mine, dim = value(parameter).contiguous(), _split_dim(name, parameter)
    full = mine
    if group.size() > 1 and dim is not None:
        shards = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(shards, mine, group=group)
        if num_parts == 2:
            halves = [shard.chunk(2) for shard in shards]
            full = torch.cat([half[i] for i in (0, 1) for half in halves])
        else:
            full = torch.cat(shards, dim)
    return full[: spec.vocab_size] if name in _VOCAB_NAMES else full


def _spread_expert(model: Model, name: str, full: Tensor) -> None:
    """From the expert-parallel rank that holds this expert to the others of its stage, in place."""
    expert, group = expert_of(name), parallel_state.get_expert_model_parallel_group()
    if expert is not None and group.size() > 1:
        owner = expert // (model.spec.num_experts // model.parallel.ep)
        dist.broadcast(full, src=dist.get_global_rank(group, owner), group=group)


def _fused_shape(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])
