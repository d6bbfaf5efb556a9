"""Two folders of whole tensors, compared by name; which ranks hold a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vime.align.tensors import TensorGap, tensor_gap
from vime.config.schema import Config
from vime.models import ModelSpec, rank_names
from vime.weights.shards import Shards


def gaps_of(ours: Shards, theirs: Shards, before: Shards | None = None) -> list[TensorGap]:
    """Of every tensor that one of the two has. ``before``: ours before the step."""
    names, others = set(ours.names()), set(theirs.names())
    found = [TensorGap.incomparable(name, "the candidate has none") for name in sorted(names - others)]
    found += [TensorGap.incomparable(name, "the reference has none") for name in sorted(others - names)]
    for name in (name for name in ours.names() if name in others):
        a, b = numbers_of(ours, name), numbers_of(theirs, name)
        if a.shape == b.shape:
            found.append(tensor_gap(name, a, b, None if before is None else numbers_of(before, name)))
        else:
            found.append(TensorGap.incomparable(name, f"shape {list(a.shape)} -> {list(b.shape)}"))
    return found


def holders_of(spec: ModelSpec, config: Config) -> Callable[[str], str]:
    """Name of a tensor -> the pipeline stage and the trainer ranks that hold it; "no rank" for another model's."""
    layout = config.parallel
    width = layout.world_size // layout.pp
    stage_of = {
        name: stage
        for stage in range(layout.pp)
        for names in rank_names(spec, layout, stage).values()
        for name in names
    }

    def holders(name: str) -> str:
        if name not in stage_of:
            return "no rank"
        first = stage_of[name] * width
        ranks = f"ranks {first}-{first + width - 1}" if width > 1 else f"rank {first}"
        return f"stage {stage_of[name]}, {ranks}" if layout.pp > 1 else ranks

    return holders


def numbers_of(shards: Shards, name: str) -> Any:
    """A tensor as a float32 array: exact for float32 and bfloat16."""
    return shards.tensor(name).float().numpy()
