"""Writes weights into a shared file and hands them to an engine, as the transport does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from conftest import Engine
from safetensors.torch import load_file

from vime.types import TensorEntry, WeightManifest
from vime.weights.manifest import build_manifest, entry_of
from vime.weights.shm import BufferPlan, SharedBuffer


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def send(
    engine: Engine,
    version: int,
    tensors: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor] | None = None,
    verify: str = "full",
    is_strict: bool = True,
) -> tuple[WeightManifest, Any, Any]:
    """Update ``engine``; ``expected``: the tensors whose digests it is told, where they are not those sent.

    ``is_strict``: False, it is told none, and goes on with whatever came.
    """
    entries = [TensorEntry(n, tuple(t.shape), str(t.dtype)[6:]) for n, t in tensors.items()]
    plan = BufferPlan.of(entries)
    buffer = SharedBuffer.create(plan.num_bytes)
    try:
        sent = buffer.write(plan, tensors.items(), version)
        told = sent.tensors if expected is None else {n: entry_of(n, t) for n, t in expected.items()}
        if not is_strict:
            told = {name: replace(entry, digest="") for name, entry in told.items()}
        rows = list(zip(told.values(), plan.offsets, strict=True))
        return sent, *engine("update_weights", version, buffer.path, rows, verify)
    finally:
        buffer.close()
        buffer.unlink()


def checkpoint_manifest(folder: Path) -> WeightManifest:
    return build_manifest(0, "checkpoint", tensors_of(folder).items())
