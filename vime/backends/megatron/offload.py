"""Free device memory while the engine works, and get it back. Storages are emptied in place, so views stay valid.

On the CPU there is nowhere to move to: ``MegatronRank.offload`` does nothing there. The mechanism itself is blind to
the device and tested on the CPU; it was not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vime.backends.megatron.build import Model
from vime.backends.megatron.step import Learner


@dataclass
class Offloaded:
    """Storages that are empty now, with their content on the host (None: content is not needed, zero on return)."""

    entries: list[tuple[Any, Tensor | None, int]] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(size for _, _, size in self.entries)


def empty(kept: Iterable[Tensor], zeroed: Iterable[Tensor] = ()) -> Offloaded:
    """Empty the storages of all tensors; those of ``kept`` are copied to the host first. Shared storages count once."""
    done = Offloaded()
    seen: set[int] = set()
    for tensors, keep in ((kept, True), (zeroed, False)):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.size() == 0 or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            done.entries.append((storage, _bytes(storage).to("cpu", copy=True) if keep else None, storage.size()))
    for storage, _, _ in done.entries:
        storage.resize_(0)
    return done


def refill(offloaded: Offloaded) -> None:
    """Give every storage its size and content back, bitwise."""
    for storage, content, size in offloaded.entries:
        storage.resize_(size)
        view = _bytes(storage)
        view.copy_(content) if content is not None else view.zero_()
    offloaded.entries.clear()


def tensors_of(learner: Learner, reference: Model | None) -> tuple[list[Tensor], list[Tensor]]:
    """(content to keep, gradient buffers) of everything that lives on the device."""
    kept = [p.data for module in learner.model.modules for p in module.parameters()]
    if reference is not None:
        kept += [p.data for module in reference.modules for p in module.parameters()]
    for optimizer in learner.optimizers:
        kept += [p.data for p in optimizer.get_parameters()]
        for state in optimizer.optimizer.state.values():
            kept += [value for value in state.values() if isinstance(value, Tensor) and value.numel() > 1]
    gradients = [p.main_grad for module in learner.model.modules for p in module.parameters()]
    return kept, gradients


def _bytes(storage: Any) -> Tensor:
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    view.set_(storage)
    return view
