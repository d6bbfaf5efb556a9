"""Faults of ``vime.align.faults`` in what a trainer exports: functions of a stream of (Hugging Face name, tensor)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vime.errors import UsageError
from vime.models import ModelSpec, layer_of

if TYPE_CHECKING:
    from torch import Tensor

Named = tuple[str, "Tensor"]
NUM_PADDING_ROWS = 64
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class ExportFault:
    """What one fault changes.

    names    of the tensors it takes, by model; UsageError where the model has no place for it
    change   their values by name -> the new values; a name that is not among them is a tensor more
    text     what was changed, in words; ``{0}`` and ``{1}`` are the first and the last of ``names``
    """

    names: Callable[[ModelSpec], list[str]]
    change: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    text: str

    def check(self, spec: ModelSpec) -> None:
        """UsageError where the model has no place for the fault."""
        self.names(spec)

    def says(self, spec: ModelSpec) -> str:
        names = self.names(spec)
        return self.text.format(names[0], names[-1])

    def apply(self, spec: ModelSpec, stream: Iterable[Named]) -> Iterator[Named]:
        """The same names in the same order, with other values; what stands between them is held back until all came."""
        names = self.names(spec)
        missing = set(names)
        held: dict[str, Tensor] = {}
        taken: dict[str, Tensor] = {}
        for name, tensor in stream:
            if not missing or not (held or name in missing):
                yield name, tensor
                continue
            held[name] = tensor
            if name in missing:
                taken[name] = tensor
                missing.discard(name)
            if not missing:
                yield from (held | self.change({name: taken[name] for name in names})).items()


def _middle(spec: ModelSpec) -> list[str]:
    """Tensors of the layer in the middle, in the order of the table."""
    return [name for name in spec.tensors() if layer_of(name) == spec.num_layers // 2]


def _pair(spec: ModelSpec, first: str, second: str) -> list[str]:
    """The tensor of the middle layer that ends on ``first``, and its twin."""
    name = next(name for name in _middle(spec) if name.endswith(f"{first}.weight"))
    return [name, name.replace(first, second)]


def _two_layers(spec: ModelSpec) -> list[str]:
    if spec.num_layers < 2:
        raise UsageError(f"stage-offset: the model has {spec.num_layers} layer")
    return [name for name in spec.tensors() if layer_of(name) in (0, spec.num_layers // 2)]


def _exchange_layers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    one, other = sorted({layer_of(name) for name in tensors}, key=str)
    twin = {str(one): str(other), str(other): str(one)}
    parts = {name: name.split(".", 3) for name in tensors}
    return {name: tensors[".".join([a, b, twin[layer], rest])] for name, (a, b, layer, rest) in parts.items()}


def _query_and_key(spec: ModelSpec) -> list[str]:
    return _pair(spec, "q_proj", "k_proj")


def _exchange_rows(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    import torch

    (q_name, q), (k_name, k) = tensors.items()
    count = min(len(q), len(k))
    return {q_name: torch.cat([k[:count], q[count:]]), k_name: torch.cat([q[:count], k[count:]])}


def _gate_and_up(spec: ModelSpec) -> list[str]:
    return _pair(spec, "gate_proj", "up_proj")


def _exchange(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    one, other = tensors
    return {one: tensors[other], other: tensors[one]}


def _join_in_rank_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Two ranks hold [gate 0, up 0] and [gate 1, up 1]; joined as they come, the halves are taken for gate and up."""
    import torch

    (gate_name, gate), (up_name, up) = tensors.items()
    shards = [torch.cat([g, u]) for g, u in zip(gate.chunk(2), up.chunk(2), strict=True)]
    first, second = torch.cat(shards).chunk(2)
    return {gate_name: first.contiguous(), up_name: second.contiguous()}


def _square(spec: ModelSpec) -> list[str]:
    shapes = spec.tensors()
    for name in _middle(spec):
        if len(shapes[name]) == 2 and shapes[name][0] == shapes[name][1]:
            return [name]
    raise UsageError(f"transposed: no matrix of layer {spec.num_layers // 2} is square")


def _transpose(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.T.contiguous() for name, tensor in tensors.items()}


def _pad(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    import torch

    return {n: torch.cat([t, t.new_zeros(NUM_PADDING_ROWS, *t.shape[1:])]) for n, t in tensors.items()}


def _embedding_and_head(spec: ModelSpec) -> list[str]:
    return [EMBEDDING] if spec.is_tied else [EMBEDDING, HEAD]


def _repeat_embedding(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {HEAD: tensors[EMBEDDING].clone()}


EXPORT_FAULTS: dict[str, ExportFault] = {
    "stage-offset": ExportFault(_two_layers, _exchange_layers, "the layers of {0} and {1} have each other's names"),
    "swapped-qk": ExportFault(_query_and_key, _exchange_rows, "rows of {0} and {1} are exchanged"),
    "swapped-gate-up": ExportFault(_gate_and_up, _exchange, "{0} and {1} have each other's values"),
    "joined-shards": ExportFault(_gate_and_up, _join_in_rank_order, "the shards of {0} and {1} are joined by rank"),
    "transposed": ExportFault(_square, _transpose, "{0} is transposed"),
    "padded-rows": ExportFault(lambda _: [EMBEDDING], _pad, f"{{0}} keeps {NUM_PADDING_ROWS} rows of padding"),
    "duplicated-lm-head": ExportFault(
        _embedding_and_head, _repeat_embedding, f"{HEAD} is exported as a copy of the embedding"
    ),
}
