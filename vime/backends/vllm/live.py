"""The weights of a live worker as its loader wrote them, also where a CPU kernel has rearranged them since."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterator, Mapping

import torch

from vime.errors import VimeError

_KEPT = 4  # unpacked at a time: the two expert tensors of a layer alternate in the order of the names
_DIGIT = 256  # exact in every weight type, bfloat16 too


class LiveWeights(Mapping[str, torch.Tensor]):
    """Parameters and buffers by name.

    Expert tensors that vLLM has packed for its CPU kernel are copies in the loader's layout, at most four at once; all
    others are the live tensors themselves.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors = {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}
        self._isa = {name: isa for name, (isa, _) in _packed_parameters(model).items()}
        self._unpacked: OrderedDict[str, torch.Tensor] = OrderedDict()

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._isa:
            return self._tensors[name]
        if name not in self._unpacked:
            while len(self._unpacked) >= _KEPT:
                self._unpacked.popitem(last=False)
            self._unpacked[name] = unpacked(self._tensors[name], self._isa[name])
        return self._unpacked[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def packed(model: torch.nn.Module) -> frozenset[str]:
    """Parameters that a kernel has rearranged and ``LiveWeights`` gives in the loader's layout."""
    return frozenset(_packed_parameters(model))


def padding(model: torch.nn.Module) -> dict[str, int]:
    """Name -> elements that a kernel has added to a parameter, which nothing is ever loaded into."""
    return {name: count for name, (_, count) in _packed_parameters(model).items() if count}


def _packed_parameters(model: torch.nn.Module) -> dict[str, tuple[str, int]]:
    """Name of each packed parameter -> (instruction set of the kernel, elements of padding).

    Empty on a GPU, whose layouts are not undone.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return {}
    from vime.backends.vllm.cpu_repairs import packed_experts

    known = packed_experts()
    return {
        f"{prefix}.{name}": (known[module].isa, count)
        for prefix, module in model.named_modules()
        if module in known
        for name, count in known[module].padding.items()
    }


def unpacked(packed: torch.Tensor, isa: str) -> torch.Tensor:
    """Inverse of vLLM's ``cpu_prepack_moe_weight``: [experts, rows, columns] of the same type."""
    order = _order(tuple(packed.shape[1:]), packed.dtype, isa)
    whole = torch.empty_like(packed)
    whole.flatten(1).index_copy_(1, order, packed.flatten(1))
    return whole


@functools.lru_cache(maxsize=4)
def _order(shape: tuple[int, ...], dtype: torch.dtype, isa: str) -> torch.Tensor:
    """int64 [rows * columns]: which element of an expert lies at each place of its packed form.

    Found by packing the elements' own numbers, digit by digit. Raises VimeError if packing is no rearrangement.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    numel = shape[0] * shape[1]
    order = torch.zeros(numel, dtype=torch.int64)
    rest, weight = torch.arange(numel), 1
    while weight < numel:
        digits = (rest % _DIGIT).to(dtype).view(1, *shape)
        order += cpu_prepack_moe_weight(digits, isa).flatten().to(torch.int64) * weight
        rest, weight = rest // _DIGIT, weight * _DIGIT
    if not torch.equal(order.sort().values, torch.arange(numel)):
        raise VimeError(
            f"vLLM's CPU kernel ({isa}) packs experts of {list(shape)} {dtype} into more than another order",
            "what the engine holds cannot be read back with this version of vLLM",
        )
    return order
