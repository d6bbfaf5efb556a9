"""What the engines hold, against the checkpoint they were started from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from vime.errors import UsageError
from vime.types import WeightManifest
from vime.weights.checkpoint import checkpoint_manifest
from vime.weights.manifest import Difference, compare


class Engines(Protocol):
    """What can be asked of all engines of a run."""

    def held(self) -> Mapping[str, WeightManifest]: ...

    def changed_buffers(self) -> Mapping[str, list[list[str]]]: ...


@dataclass(frozen=True, slots=True)
class EngineState:
    """num_tensors: tensors that were compared; num_wrong: those of them that are not the checkpoint's, in the worst
    engine; differences, lost_buffers: in all engines, each once; unknown: why weights could not be compared.
    """

    num_tensors: int = 0
    num_wrong: int = 0
    differences: tuple[Difference, ...] = ()
    lost_buffers: tuple[str, ...] = ()
    unknown: str = ""


def engine_state(engines: Engines, folder: str) -> EngineState:
    """Read back weights and buffers of every engine. Their weights must be those of ``folder``, never updated."""
    ranks = [names for per_rank in engines.changed_buffers().values() for names in per_rank]
    lost = tuple(dict.fromkeys(name for names in ranks for name in names))
    try:
        held = engines.held()
    except UsageError as error:
        return EngineState(lost_buffers=lost, unknown=error.message)
    found: dict[tuple[str, str], Difference] = {}
    num_wrong = num_tensors = 0
    for manifest in held.values():
        dtypes = {name: entry.dtype for name, entry in manifest.tensors.items()}
        expected = checkpoint_manifest(folder, dtypes)
        found |= {(d.kind, d.name): d for d in compare(expected, manifest)}
        wrong = [n for n, e in expected.tensors.items() if manifest.tensors[n].digest not in ("", e.digest)]
        num_wrong, num_tensors = max(num_wrong, len(wrong)), len(expected.tensors)
    if not num_tensors and not found:
        return EngineState(lost_buffers=lost, unknown="the engines hold no tensor to compare")
    return EngineState(num_tensors, num_wrong, tuple(found.values()), lost)
