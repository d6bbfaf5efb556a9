"""A kernel that rearranges a parameter in a way that is not known: what it holds is NOT TESTED, not made up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vime.backends.vllm import layouts
from vime.backends.vllm.held import HeldWeights
from vime.backends.vllm.loader_trace import trace
from vime.backends.vllm.update import WeightUpdate
from vime.backends.vllm.worker import WorkerExtension, entries_of
from vime.types import TensorEntry
from vime.weights.compare import Kind, diff
from vime.weights.manifest import digest
from vime.weights.manifest_file import Dump, TensorRecord, read_dump, write_dump
from vime.weights.shm import BufferPlan, SharedBuffer
from vime.weights.values import record_of

KNOWN, REPACKED, TRANSPOSED = "known.weight", "repacked.weight", "turned.weight"


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name in ("known", "repacked", "turned"):
            layer = torch.nn.Linear(4, 8, bias=False)
            layer.weight.data = torch.randn(8, 4, generator=generator)
            setattr(self, name, layer)

    def load_weights(self, weights) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)


def _process(model: Model) -> None:
    """As a kernel's own layout: the same shape with the elements elsewhere, and another shape."""
    model.repacked.weight.data = model.repacked.weight.data.flatten().flip(0).view(8, 4)
    model.turned.weight = torch.nn.Parameter(model.turned.weight.data.t().contiguous())


@pytest.fixture
def model() -> Model:
    """Processed after loading, under watch."""
    found = Model()
    layouts.watching(_process)(found)
    return found


def test_what_was_rearranged_is_seen(model: Model) -> None:
    assert layouts.rearranged(model) == {REPACKED, TRANSPOSED}
    assert layouts.rearranged(Model()) == frozenset()
    assert set(layouts.unreadable(model, frozenset({TRANSPOSED}))) == {REPACKED}
    untouched = Model()
    layouts.watching(lambda m: None)(untouched)
    assert layouts.rearranged(untouched) == frozenset()


class Worker(WorkerExtension):
    def __init__(self, model: torch.nn.Module, rows) -> None:
        self.model_runner = SimpleNamespace(get_model=lambda: model)
        self._vime_layout = trace(model, entries_of(rows))
        self._vime_specs = {e.name: e for e in entries_of(rows)}


class Held(HeldWeights):
    """An engine of one worker in this process."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.index, self.weight_version = worker, 0, 0
        self.config = SimpleNamespace(rollout=SimpleNamespace(engine_tp=1))
        self._specs, self.unreadable = worker._vime_specs, worker._vime_unreadable()

    async def _rpc(self, method, *args):
        return [getattr(self.worker, method)(*args)]


ROWS = [[KNOWN, [8, 4], "float32"], [REPACKED, [8, 4], "float32"]]


def test_the_engine_says_what_it_cannot_read_back(model: Model, tmp_path: Path) -> None:
    """The dump of what is held has no digest there, and says why; the comparison is neither equal nor different."""
    engine = Held(Worker(model, ROWS))
    assert engine.unreadable == {REPACKED: f"{layouts.UNDONE} ({REPACKED})"}
    manifest = asyncio.run(engine.held())
    assert [manifest.tensors[n].digest for n in (KNOWN, REPACKED)] == [digest(model.known.weight), ""]
    rows = asyncio.run(engine.dump_held({"rows": ROWS, "folder": str(tmp_path)}))
    held = Dump(0, "engine-held", {n: TensorRecord.from_dict(row) for n, row in rows.items()})
    write_dump(tmp_path / "engine-held.manifest.json", held)
    assert read_dump(tmp_path / "engine-held.manifest.json").tensors == held.tensors
    loaded = Model()  # the same seed: what was loaded
    checkpoint = Dump(
        0, "checkpoint", {n: record_of(n, getattr(loaded, n.split(".")[0]).weight) for n in (KNOWN, REPACKED)}
    )
    found = diff(checkpoint, held)
    assert found.is_equal
    assert found.summary == "engine-held = checkpoint: 1/2 tensors bitwise equal, 1 NOT TESTED"
    assert [t.kind for t in found.tensors] == [Kind.EQUAL, Kind.UNTESTED]
    assert found.notes == (f"NOT TESTED: 1 tensors of engine-held, first {REPACKED}: {layouts.UNDONE} ({REPACKED})",)


@pytest.mark.parametrize("tp", [1, 2])
def test_an_update_digests_what_it_can_read_back(model: Model, tp: int) -> None:
    worker, entries = Worker(model, ROWS), entries_of(ROWS)
    plan = BufferPlan.of(entries)
    buffer = SharedBuffer.create(plan.num_bytes)
    try:
        for entry, tensor in buffer.views(plan):
            tensor.copy_(model.known.weight.detach() if entry.name == KNOWN else torch.zeros(8, 4))
        sent = [
            (TensorEntry(e.name, e.shape, e.dtype, "1" * 64), at) for e, at in zip(entries, plan.offsets, strict=True)
        ]

        class Llm:
            async def collective_rpc(self, method, args):
                return [getattr(worker, method)(*args)]

        update = WeightUpdate(Llm(), 1, buffer.path, sent, tp, None, worker._vime_unreadable())  # type: ignore[arg-type]
        received = update._manifest("engine-received", {e.name: "1" * 64 for e in entries})
        held = asyncio.run(update._held_whole() if tp == 1 else update._held_in_parts(received))
    finally:
        buffer.close()
        buffer.unlink()
    assert held.tensors[REPACKED].digest == ""
    assert held.tensors[KNOWN].digest == (digest(model.known.weight) if tp == 1 else "1" * 64)
