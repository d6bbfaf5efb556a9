"""What a live engine holds: its loader traced, its weights read back and dumped, its buffers watched."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vime.backends.vllm.calls import EngineCalls
from vime.backends.vllm.update import required_specs, untested
from vime.errors import VimeError
from vime.types import TensorEntry, WeightManifest
from vime.weights.checkpoint import read_specs
from vime.weights.manifest import digest
from vime.weights.shm import BufferPlan, SharedBuffer, batches

if TYPE_CHECKING:
    import torch

HELD_BYTES = 256 << 20  # read back at a time; more where one tensor is larger


class HeldWeights(EngineCalls):
    """The part of an engine that reads: it changes no weight."""

    async def weight_specs(self) -> list[TensorEntry]:
        """Names, shapes and dtypes of the tensors that an update must carry, all of them and no other."""
        self._require_started()
        return list(self._specs.values())

    async def held(self) -> WeightManifest:
        """Digests, under Hugging Face names, of what the live parameters hold.

        The parts of several tensor-parallel ranks are put together, ``HELD_BYTES`` at a time. Empty are those of what
        cannot be read back (``unreadable``).
        """
        if self.config.rollout.engine_tp == 1:
            (digests,) = await self._rpc("vime_held", [entry.name for entry in self._readable()])
        else:
            digests = dict.fromkeys(self.unreadable, "")
            digests |= {entry.name: digest(tensor) async for entry, tensor in self.held_tensors()}
        tensors = {name: replace(self._specs[name], digest=d) for name, d in digests.items()}
        return WeightManifest(self.weight_version or 0, "engine-held", tensors)

    async def held_tensors(self) -> AsyncIterator[tuple[TensorEntry, torch.Tensor]]:
        """Every whole tensor that the ranks together hold, on the CPU. Each is valid until the next is asked for.

        Without those of ``unreadable``.
        """
        for entries in batches(self._readable(), HELD_BYTES):
            plan = BufferPlan.of(entries)
            buffer = SharedBuffer.create(plan.num_bytes)
            try:
                await self.put_held(buffer.path, plan)
                for entry, tensor in buffer.views(plan):
                    yield entry, tensor
            finally:
                buffer.close()
                buffer.unlink()

    async def put_held(self, path: str, plan: BufferPlan) -> None:
        """Fill the shared file ``path`` with the tensors of the plan as the live parameters hold them.

        Raises VimeError where ranks that should hold the same do not.
        """
        rows = [[t.name, list(t.shape), t.dtype] for t in plan.entries]
        where = (path, plan.num_bytes, rows, list(plan.offsets))
        await self._rpc("vime_put", *where)
        if self.config.rollout.engine_tp == 1:
            return
        for rank, names in enumerate(await self._rpc("vime_unequal", *where)):
            if names:
                raise VimeError(
                    f"engine {self.index}: what rank {rank} holds of {len(names)} tensors is not what another rank "
                    f"holds of the same: {', '.join(names[:5])}",
                    "sync the weights again; if it stays so, a worker's memory was written to from elsewhere",
                )

    async def dump_held(self, order: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Records (plain) of what the live parameters hold; ``order`` is a ``dumping.Order``.

        What cannot be read back has an empty digest, says why, and is not among the tensors written.
        """
        from vime.backends.vllm.dumping import Order, Stream

        asked = Order(**order)
        unread = {e.name: untested(e, self.unreadable[e.name]) for e in asked.entries if e.name in self.unreadable}
        stream = Stream(replace(asked, rows=[row for row in asked.rows if row[0] not in unread]))
        try:
            async for entry, tensor in self.held_tensors():
                stream.take(entry.name, tensor)
        except BaseException:
            stream.close()
            raise
        return stream.finish() | unread

    async def dump_buffers(self) -> dict[str, dict[str, Any]]:
        """Records (plain) of every buffer; under tensor parallelism those that differ by rank say so in their name."""
        first, *others = await self._rpc("vime_dump_buffers")
        for rank, buffers in enumerate(others, 1):
            first |= {f"{name} (rank {rank})": b for name, b in buffers.items() if b != first.get(name)}
        return first

    async def recorded_loading(self) -> dict[str, dict[str, Any]]:
        """Records of what entered the first load, which ``start`` was asked for."""
        return (await self._rpc("vime_recorded_loading"))[0]

    async def record_update(self, order: dict[str, Any]) -> None:
        """Record what enters the loader in the next update."""
        await self._rpc("vime_record_update", order)

    async def recorded_update(self) -> dict[str, dict[str, Any]]:
        """Records of the update that was asked to be recorded."""
        return (await self._rpc("vime_recorded_update"))[0]

    async def changed_buffers(self) -> list[list[str]]:
        """Per rank, the buffers (rotary caches, scales) that are not what they were when the engine started."""
        ranks = zip(self._buffers, await self._rpc("vime_buffers"), strict=True)
        return [[name for name in before if now.get(name) != before[name]] for before, now in ranks]

    async def _require_buffers(self) -> None:
        for rank, lost in enumerate(await self.changed_buffers()):
            if lost:
                self.no_weights_reason = f"buffers were lost or changed on rank {rank}: {', '.join(lost)}"
                raise VimeError(
                    f"engine {self.index}: {self.no_weights_reason}",
                    "no checkpoint and no weight sync carries these: restart the engine",
                )

    async def _check_parameters(self) -> None:
        for rank, names in enumerate(await self._rpc("vime_empty_parameters")):
            if names:
                raise VimeError(
                    f"engine {self.index} rank {rank}: {len(names)} parameters have no elements, first {names[0]}; "
                    "weights could be neither compared nor updated",
                    "check that vime's vLLM plugin is loaded (VLLM_PLUGINS must not exclude it)",
                )

    async def _trace(self) -> dict[str, TensorEntry]:
        headers = read_specs(self.config.model.path)
        rows = [[t.name, list(t.shape), t.dtype] for t in headers]
        traces = await self._rpc("vime_trace", rows)
        self.unreadable = {name: why for traced in traces for name, why in traced["unreadable"].items()}
        return required_specs(self.index, headers, traces)

    def _readable(self) -> list[TensorEntry]:
        return [entry for name, entry in self._specs.items() if name not in self.unreadable]
