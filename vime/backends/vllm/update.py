"""The weight update of one engine: what it must carry, the calls in order, the digests on both ends."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vime.errors import UsageError, VimeError
from vime.types import TensorEntry, WeightManifest
from vime.weights.manifest import compare, compare_specs
from vime.weights.manifest_file import NOT_TESTED, TensorRecord
from vime.weights.shm import num_bytes

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


def required_specs(
    index: int, headers: Sequence[TensorEntry], traces: Sequence[dict[str, Any]]
) -> dict[str, TensorEntry]:
    """The tensors an update must carry, from the checkpoint's headers and the trace of every rank.

    Raises VimeError where a parameter is not fully loaded, or a checkpoint tensor is dropped or used in part: the
    engine would compute another model than the trainer.
    """
    from vime.backends.vllm.loader_trace import Strided, covered

    for rank, traced in enumerate(traces):
        if traced["uncovered"]:
            name, count = next(iter(traced["uncovered"].items()))
            raise VimeError(
                f"engine {index} rank {rank}: {len(traced['uncovered'])} parameters are not fully loaded from the "
                f"checkpoint, first {name} ({count} elements)"
            )
    specs, dropped = {}, []
    tied = {h.name for h in headers if h.name == "lm_head.weight"}
    for header in headers:
        parts = [part for traced in traces for part in traced["regions"][header.name]]
        if not parts:
            if header.name not in tied:
                dropped.append(header.name)
            continue
        numel = 1
        for n in header.shape:
            numel *= n
        reached = covered(numel, [Strided(offset, tuple(shape), tuple(stride)) for _, offset, shape, stride in parts])
        if reached != numel:
            dropped.append(f"{header.name} ({reached} of {numel} elements used)")
        specs[header.name] = replace(header, dtype=parts[0][0])
    if dropped:
        raise VimeError(
            f"engine {index}: vLLM's loader drops {len(dropped)} tensors of the checkpoint: {', '.join(dropped[:8])}",
            "the engine would compute another model than the trainer: vLLM does not support this one as it is",
        )
    return specs


def check_update(
    index: int, specs: Mapping[str, TensorEntry], tensors: Sequence[tuple[TensorEntry, int]], path: str
) -> None:
    """Everything that can be known before the first byte. Raises UsageError listing every problem."""
    sent = {entry.name: entry for entry, _ in tensors}
    problems = [str(d) for d in compare_specs(specs, sent, "the engine", "the update")]
    if len(sent) != len(tensors):
        names = [entry.name for entry, _ in tensors]
        problems += [f"twice: {name}" for name in sent if names.count(name) > 1]
    size = os.path.getsize(path) if os.path.exists(path) else None
    end = max((offset + num_bytes(entry) for entry, offset in tensors), default=0)
    if size is None:
        problems.append(f"file: {path} does not exist")
    elif size < end:
        problems.append(f"file: {path} has {size} bytes, the tensors end at {end}")
    if problems:
        raise UsageError(
            f"engine {index} refuses the weights, nothing was changed:\n" + "\n".join(problems),
            "trainer and engine must have the same model (model.path)",
        )


def untested(entry: TensorEntry, why: str) -> dict[str, Any]:
    """The plain record of a tensor that cannot be read back."""
    return TensorRecord(entry.name, entry.shape, entry.dtype, "", how=f"{NOT_TESTED}: {why}").as_dict()


class WeightUpdate:
    """One update of one paused engine. names: the tensors that are digested; None: all.

    unreadable: those that are not read back; the digests of what is held are empty there.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        version: int,
        path: str,
        tensors: Sequence[tuple[TensorEntry, int]],
        tp: int,
        names: Sequence[str] | None = None,
        unreadable: Collection[str] = (),
    ) -> None:
        self.llm = llm
        self.version = version
        self.path = path
        self.tp = tp
        self.names = None if names is None else list(names)
        self.unreadable = set(unreadable)
        self.sent = {entry.name: entry for entry, _ in tensors}
        self.offsets = [offset for _, offset in tensors]
        self.num_bytes = max(offset + num_bytes(entry) for entry, offset in tensors)

    async def run(self, verify: str) -> tuple[WeightManifest, WeightManifest | None]:
        """Start, load, finish, read back. The engine is paused before and after."""
        await self.llm.start_weight_update()
        await self.llm.collective_rpc("update_weights", kwargs={"update_info": self._info()})
        await self.llm.finish_weight_update(str(self.version))
        received = self._received(await self.llm.collective_rpc("vime_received"))
        if verify != "full":
            return received, None
        began = time.perf_counter()
        held = await (self._held_whole() if self.tp == 1 else self._held_in_parts(received))
        return received, replace(held, seconds=time.perf_counter() - began)

    def _info(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "num_bytes": self.num_bytes,
            "names": list(self.sent),
            "shapes": [list(t.shape) for t in self.sent.values()],
            "dtypes": [t.dtype for t in self.sent.values()],
            "offsets": self.offsets,
            "digested": self.names,
        }

    def _manifest(self, origin: str, digests: Mapping[str, str]) -> WeightManifest:
        tensors = {n: replace(self.sent[n], digest=d, l2=0.0) for n, d in digests.items()}
        return WeightManifest(self.version, origin, tensors)

    def _received(self, answers: Sequence[tuple[dict[str, str], float]]) -> WeightManifest:
        ranks = [digests for digests, _ in answers]
        for rank, digests in enumerate(ranks):
            if digests != ranks[0]:
                names = [n for n in self.sent if digests.get(n) != ranks[0].get(n)]
                raise VimeError(f"ranks 0 and {rank} received different tensors: {', '.join(names[:5])}")
        return replace(self._manifest("engine-received", ranks[0]), seconds=max(seconds for _, seconds in answers))

    async def _held_whole(self) -> WeightManifest:
        names = [n for n in (self.sent if self.names is None else self.names) if n not in self.unreadable]
        (digests,) = await self.llm.collective_rpc("vime_held", args=(names,))
        return self._manifest("engine-held", digests)

    async def _held_in_parts(self, received: WeightManifest) -> WeightManifest:
        """No rank holds whole tensors: each compares its parts with the file, bytes for bytes."""
        asked = [
            (t, at)
            for t, at in zip(self.sent.values(), self.offsets, strict=True)
            if (self.names is None or t.name in self.names) and t.name not in self.unreadable
        ]
        rows = [[t.name, list(t.shape), t.dtype] for t, _ in asked]
        offsets = [at for _, at in asked]
        ranks = await self.llm.collective_rpc("vime_unequal", args=(self.path, self.num_bytes, rows, offsets))
        digests = {n: "" if n in self.unreadable else entry.digest for n, entry in received.tensors.items()}
        for rank, names in enumerate(ranks):
            digests |= dict.fromkeys(names, f"not as sent on rank {rank}")
        return self._manifest("engine-held", digests)

    def differences(self, received: WeightManifest, held: WeightManifest | None) -> list[str]:
        """What differs from the digests that came with the entries; nothing where none came."""
        known = {n: t for n, t in self.sent.items() if t.digest}
        if not known:
            return []
        sent = WeightManifest(self.version, "trainer", known)
        sides = [received] if held is None else [received, held]
        return [str(d) for side in sides for d in compare(sent, side)]
