"""Dumps of an engine's weights: as they enter vLLM's loader, and as the live parameters hold them.

What enters, rank 0 of the engine records: every rank reads the same. What is held, the engine's own process does, which
puts the parts of all ranks together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vime.types import TensorEntry
from vime.weights.dump import FolderPlan, FolderWriter, Recorder, Tensors, tell_progress
from vime.weights.values import record_of

RECORD_LOADING = "VIME_RECORD_LOADING"
"""Environment variable of an engine: JSON of an ``Order``, for the tensors that its first load reads."""


@dataclass(frozen=True, slots=True)
class Order:
    """What to dump. Plain data. rows: name, shape, dtype; tensors are cast to that dtype where they have another.

    folder    existing and empty, gets the tensors; None: digests only
    progress  file that gets the bytes done so far
    """

    rows: list[list[Any]]
    folder: str | None = None
    progress: str | None = None

    @property
    def entries(self) -> list[TensorEntry]:
        return [TensorEntry(name, tuple(shape), dtype) for name, shape, dtype in self.rows]


class Stream:
    """Tensors on their way into the loader, recorded."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.dtypes = {entry.name: entry.dtype for entry in order.entries}
        folder = order.folder
        self.writer = None if folder is None else FolderWriter(Path(folder), FolderPlan.of(order.entries))
        self.recorder = Recorder(order.entries, self.writer, tell_progress(order.progress))

    def through(self, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            self.take(name, tensor)
            yield name, tensor

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """One tensor; others than the ordered ones pass."""
        if name not in self.dtypes:
            return
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype == self.dtypes[name]:
            self.recorder.take(name, tensor)
        else:
            self.recorder.take(name, tensor.to(getattr(torch, self.dtypes[name])), how=f"cast from {dtype}")

    def finish(self) -> dict[str, dict[str, Any]]:
        """Plain records by name, once the tensors are on the disk."""
        try:
            if self.writer is not None:
                self.writer.finish()
        finally:
            self.close()
        return {name: record.as_dict() for name, record in self.recorder.records.items()}

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


_loading: list[Stream] = []


def recorded_loading() -> dict[str, dict[str, Any]]:
    """Of the first load of this process, where ``VIME_RECORD_LOADING`` asked for it; empty on ranks other than 0."""
    return _loading.pop().finish() if _loading else {}


def recording(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the loader's ``get_all_weights``: what it yields enters ``load_weights``."""

    def get_all_weights(self: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        weights = original(self, *args, **kwargs)
        order = os.environ.pop(RECORD_LOADING, None)
        if order is None or not is_first_rank():
            return weights
        _loading.append(Stream(Order(**json.loads(order))))
        return _loading[-1].through(weights)

    return get_all_weights


def record_first_load() -> None:
    """Let vLLM's loader of checkpoints be recorded. May be called any number of times."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    original = DefaultModelLoader.get_all_weights
    if not getattr(original, "_vime_records", False):
        wrapped = recording(original)
        wrapped._vime_records = True  # type: ignore[attr-defined]
        DefaultModelLoader.get_all_weights = wrapped  # type: ignore[method-assign]


def dump_buffers(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Records of every buffer, with whether a ``state_dict`` has it, by the engine's names."""
    persistent = set(model.state_dict())
    found = {}
    for name, buffer in model.named_buffers():
        how = "persistent" if name in persistent else "non-persistent"
        found[name] = record_of(name, buffer, how).as_dict()
    return found


def is_first_rank() -> bool:
    """Of the workers of this engine."""
    from vllm.distributed import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank() == 0
