"""The weight sync, trainer to engine, against memcpy of the same bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from benchmarks.cases import QUICKSTART, Case
from benchmarks.measure import Result, compare, interleave
from vime.cluster.engines import RayEngines
from vime.cluster.placement import place
from vime.cluster.session import RaySession
from vime.cluster.trainer import RayTrainer
from vime.types import TensorEntry
from vime.weights.manifest import digest
from vime.weights.shm import BufferPlan, SharedBuffer
from vime.weights.transport import ShmTransport


def run(repetitions: int, cases: Sequence[Case] = (QUICKSTART,)) -> Result:
    result = Result("sync")
    result.notes.append(
        "transaction: names and shapes checked on both sides, weights written to shared memory by the trainer and "
        "loaded by the engine, every tensor digested where it lies in the file, where it enters the engine and (full) "
        "where the engine holds it; copy: every tensor into the same kind of file, nothing else; digest: blake3 of "
        "every tensor, once; memcpy: one array to another, both mapped already"
    )
    for case in cases:
        with ExitStack() as stack:
            _measure(case, repetitions, result, stack)
    return result


def _measure(case: Case, repetitions: int, result: Result, stack: ExitStack) -> None:
    config = case.config(algo={"log_ref": False})
    session = RaySession.start(config)
    stack.callback(session.close)
    placement = place(config, session.resources())
    engines = RayEngines(config, session, placement.engine_options)
    engines.begin()
    trainer = RayTrainer(config, session, placement.trainer_options)
    trainer.start()
    engines.wait()
    stack.callback(engines.shutdown)
    specs = trainer.weight_specs()
    full, received = (
        ShmTransport(trainer.write_weights, specs, engines.engines, verify, config.weights.timeout_seconds)
        for verify in ("full", "received")
    )
    stack.callback(full.close)
    stack.callback(received.close)
    local = LocalCopy.of(specs)
    stack.callback(local.close)
    sides = {
        "memcpy": lambda turn: _seconds(local.memcpy),
        "transaction, verify=full": lambda turn: _seconds(full.sync, 2 * turn),
        "transaction, verify=received": lambda turn: _seconds(received.sync, 2 * turn + 1),
        "copy into shared memory alone": lambda turn: _seconds(local.copy),
        "digest alone": lambda turn: _seconds(local.digest),
    }
    found = interleave(sides, repetitions)
    size = local.plan.num_bytes
    rates = {name: [size / seconds / 1e9 for seconds in values] for name, values in found.items()}
    for name in list(sides)[1:]:
        result.rows.append(compare(f"{case.name}, {size / 1e6:.0f} MB: {name}", "GB/s", rates[name], rates["memcpy"]))


def _seconds(call: object, *args: object) -> float:
    start = time.perf_counter()
    call(*args)  # type: ignore[operator]
    return time.perf_counter() - start


@dataclass
class LocalCopy:
    """The same bytes in this process: what the machine does without anything around it."""

    plan: BufferPlan
    buffer: SharedBuffer
    source: np.ndarray  # uint8, all tensors at the offsets of the plan
    target: np.ndarray

    @classmethod
    def of(cls, specs: Sequence[TensorEntry]) -> LocalCopy:
        plan = BufferPlan.of(specs)
        source = np.random.default_rng(0).integers(0, 256, plan.num_bytes, dtype=np.uint8)
        return cls(plan, SharedBuffer.create(plan.num_bytes), source, np.ones_like(source))

    def memcpy(self) -> None:
        np.copyto(self.target, self.source)

    def copy(self) -> None:
        import torch

        for (entry, view), offset in zip(self.buffer.views(self.plan), self.plan.offsets, strict=True):
            tensor = torch.frombuffer(self.source, dtype=view.dtype, count=view.numel(), offset=offset)
            view.copy_(tensor.view(entry.shape))

    def digest(self) -> None:
        for _, view in self.buffer.views(self.plan):
            digest(view)

    def close(self) -> None:
        self.buffer.close()
        self.buffer.unlink()
