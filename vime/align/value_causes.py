"""Why exported tensors have other values than the checkpoint's: rows in another order, transposed, rounded."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from vime.weights.compare import diff
from vime.weights.difference import Finding
from vime.weights.manifest import layer_of
from vime.weights.manifest_file import Dump
from vime.weights.shards import Shards
from vime.weights.values import record_of

MOST_LAYERS = 4
"""Layers that are read again: one fault in the export is in every layer alike, or in few."""


def value_causes(checkpoint: Path, exported: Path, dtype: str, names: Collection[str]) -> list[Finding]:
    """What the tensors ``names``, which differ, come from; both folders hold safetensors, the checkpoint's are cast.

    Whole layers are compared, for a row may have come from another matrix of its layer. At most ``MOST_LAYERS``.
    """
    import torch

    ours, theirs = Shards(checkpoint), Shards(exported)
    layers = sorted({layer for name in names if (layer := layer_of(name)[1]) is not None})[:MOST_LAYERS]
    present = set(ours.names())
    wanted = [n for n in theirs.names() if n in present and (layer_of(n)[1] in layers or n in _outside(names))]

    def expected(name: str) -> torch.Tensor:
        return ours.tensor(name).to(getattr(torch, dtype))

    a = Dump(0, "the checkpoint", {name: record_of(name, expected(name)) for name in wanted})
    b = Dump(0, "the export", {name: record_of(name, theirs.tensor(name)) for name in wanted})
    return list(diff(a, b, expected, theirs.tensor).findings) if wanted else []


def _outside(names: Collection[str]) -> set[str]:
    return {name for name in names if layer_of(name)[1] is None}
