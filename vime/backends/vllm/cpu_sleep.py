"""Sleep on the CPU platform, which vLLM does not have there: the same memory is freed and the same state is lost.

Level 1 keeps a copy of everything; level 2 keeps the buffers and drops the parameters, as vLLM's GPU allocator does.
On waking, what was dropped is filled with NaN, so that a tensor which is not sent again cannot pass unnoticed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Sleeping:
    """What ``wake`` needs: storages with their sizes, and copies of those that are kept."""

    weights: list[tuple[torch.UntypedStorage, int, torch.Tensor | None]] = field(default_factory=list)
    caches: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list)
    freed_bytes: int = 0


def sleep(model: torch.nn.Module, caches: list[torch.Tensor], level: int) -> Sleeping:
    """Free parameters, buffers, packed copies and key/value caches."""
    state = Sleeping()
    seen: set[int] = set()
    buffers = {t.untyped_storage().data_ptr() for t in model.buffers()}
    for tensor in [*model.parameters(), *model.buffers()]:
        storage = tensor.data.untyped_storage()
        key, size = storage.data_ptr(), storage.size()
        if size == 0 or key in seen:
            continue
        seen.add(key)
        is_kept = level == 1 or key in buffers
        state.weights.append((storage, size, _bytes(storage, size).clone() if is_kept else None))
    for layer in model.modules():
        if getattr(layer, "cpu_linear", None) is not None:
            layer.cpu_linear = _asleep  # type: ignore[assignment]  # frees oneDNN's packed copy
    for tensor in caches:
        storage = tensor.untyped_storage()
        if storage.size() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            state.caches.append((storage, storage.size()))
    for storage, size in [(s, n) for s, n, _ in state.weights] + state.caches:
        storage.resize_(0)
        state.freed_bytes += size
    return state


def wake(model: torch.nn.Module, state: Sleeping) -> None:
    """Give the memory back: kept copies as they were, dropped parameters full of NaN, caches full of zeros."""
    from vime.backends.vllm.cpu_repairs import refresh

    for storage, size, kept in state.weights:
        storage.resize_(size)
        if kept is None:
            _bytes(storage, size).fill_(0xFF)  # NaN in every floating-point type
        else:
            _bytes(storage, size).copy_(kept)
    for storage, size in state.caches:
        storage.resize_(size)
        _bytes(storage, size).zero_()
    refresh(model, is_complete=True)


def kv_caches(runner: Any) -> list[torch.Tensor]:
    """Every key/value cache tensor of a model runner."""
    layers = runner.vllm_config.compilation_config.static_forward_context.values()
    found: list[torch.Tensor] = []
    for cache in [*(getattr(layer, "kv_cache", None) for layer in layers), *getattr(runner, "kv_caches", [])]:
        found += [t for t in (cache if isinstance(cache, (list, tuple)) else [cache]) if isinstance(t, torch.Tensor)]
    return found


def _bytes(storage: torch.UntypedStorage, size: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,))


def _asleep(*_: Any) -> Any:
    raise RuntimeError("the engine sleeps: its weights are freed")
