"""Where each Hugging Face tensor lands in the live model, found by tracing the model's own loader.

``load_weights`` is run on tensors without data while every copy that would land in a parameter is recorded instead of
done: no table of fused tensors, tensor-parallel shards or experts is needed, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vime.types import TensorEntry

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Strided:
    """A region of a tensor's storage, in elements."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Strided:
        return cls(tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))

    def within(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class Region:
    """One copy of the loader: ``source`` of the Hugging Face tensor goes to ``target`` of the named parameter."""

    parameter: str
    target: Strided
    source: Strided


@dataclass
class Layout:
    """regions: Hugging Face name -> its copies. uncovered: parameter -> elements that no copy reaches."""

    regions: dict[str, list[Region]]
    uncovered: dict[str, int] = field(default_factory=dict)


class LoaderTrace(TorchDispatchMode):
    """Records copies and fills whose destination is a parameter or buffer of the model, and does not do them."""

    def __init__(self, owners: dict[int, str]) -> None:
        super().__init__()
        self.owners = owners
        self.current = ""
        self.copies: list[tuple[str, Region]] = []
        self.fills: list[tuple[str, Strided]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in (aten.copy_.default, aten.fill_.Scalar, aten.zero_.default):
            target = args[0]
            owner = self.owners.get(target.untyped_storage().data_ptr()) if target.device.type != "meta" else None
            if owner is not None:
                if func is aten.copy_.default:
                    self.copies.append((self.current, Region(owner, Strided.of(target), Strided.of(args[1]))))
                else:
                    self.fills.append((owner, Strided.of(target)))
                return target
        return func(*args, **(kwargs or {}))


def trace(model: torch.nn.Module, specs: Sequence[TensorEntry]) -> Layout:
    """Run the model's loader over ``specs`` without data. Exceptions of the loader carry the tensor's name."""
    tensors = {n: t for n, t in [*model.named_parameters(), *model.named_buffers()] if t.numel()}
    recorder = LoaderTrace({t.untyped_storage().data_ptr(): n for n, t in reversed(tensors.items())})

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for spec in specs:
            recorder.current = spec.name
            yield spec.name, torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")

    with torch.no_grad(), recorder:
        try:
            model.load_weights(stream())  # type: ignore[operator]
        except Exception as error:
            error.add_note(f"while tracing where vLLM loads {recorder.current}")
            raise
    regions: dict[str, list[Region]] = {spec.name: [] for spec in specs}
    for name, region in recorder.copies:
        regions[name].append(region)
    return Layout(regions, _uncovered(model, recorder))


def _uncovered(model: torch.nn.Module, recorder: LoaderTrace) -> dict[str, int]:
    reached: dict[str, list[Strided]] = {}
    for _, region in recorder.copies:
        reached.setdefault(region.parameter, []).append(region.target)
    for owner, strided in recorder.fills:
        reached.setdefault(owner, []).append(strided)
    missing = {}
    for name, parameter in model.named_parameters():
        count = parameter.numel() - covered(parameter.numel(), reached.get(name, []))
        if count:
            missing[name] = count
    return missing


def covered(numel: int, parts: Sequence[Strided]) -> int:
    """How many of ``numel`` contiguous elements the parts reach, each counted once."""
    mask = torch.zeros(numel, dtype=torch.bool)
    for part in parts:
        part.within(mask).fill_(True)
    return int(mask.sum())
