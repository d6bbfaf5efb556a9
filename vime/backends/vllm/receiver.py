"""vLLM's side of the shared-memory weight transfer (backend ``vime_shm``), in each worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from vime.backends.vllm.dumping import Stream
from vime.types import TensorEntry
from vime.weights.manifest import digest
from vime.weights.shm import BufferPlan, SharedBuffer


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Nothing to set up: every update names its own file."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """path and size of the shared file; name, shape, dtype and first byte of each tensor.

    digested: the names of those that are; None: all.
    """

    path: str
    num_bytes: int
    names: list[str]
    shapes: list[list[int]]
    dtypes: list[str]
    offsets: list[int]
    digested: list[str] | None = None

    def plan(self) -> BufferPlan:
        rows = zip(self.names, self.shapes, self.dtypes, strict=True)
        return BufferPlan(tuple(TensorEntry(n, tuple(s), d) for n, s, d in rows), tuple(self.offsets), self.num_bytes)


class ShmReceiver(WeightTransferEngine):
    """Loads whole Hugging Face tensors through vLLM's layerwise reload, which redoes what follows the first load too.

    received   digest of each tensor as it entered ``load_weights`` in the latest update, empty where none was asked for
    seconds    what the digests of the latest update took
    stream     dumps what enters, where a dump was asked for
    dropped    names that a planted fault keeps out of it
    damage     what a planted fault does after every update
    """

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*args, **kwargs)
        self.received: dict[str, str] = {}
        self.seconds = 0.0
        self.stream: Stream | None = None
        self.dropped: frozenset[str] = frozenset()
        self.damage: Callable[[], object] | None = None

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        return

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
        from vllm.platforms import current_platform

        self.received = {}
        self.seconds = 0.0
        if current_platform.is_cpu():
            from vime.backends.vllm.cpu_repairs import forget_packed

            forget_packed()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        buffer = SharedBuffer.attach(update_info.path, update_info.num_bytes)
        try:
            tensors = self._digested(buffer, update_info.plan(), update_info.digested)
            self.model.load_weights(tensors if self.stream is None else self.stream.through(tensors))
        finally:
            buffer.close()

    def _digested(
        self, buffer: SharedBuffer, plan: BufferPlan, names: list[str] | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        chosen = None if names is None else set(names)
        for entry, tensor in buffer.views(plan):
            if entry.name in self.dropped:
                continue
            began = time.perf_counter()
            self.received[entry.name] = digest(tensor) if chosen is None or entry.name in chosen else ""
            self.seconds += time.perf_counter() - began
            yield entry.name, tensor

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        from vllm.platforms import current_platform

        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            from vime.backends.vllm.cpu_repairs import refresh

            refresh(self.model)
        if self.damage is not None:
            self.damage()

    def shutdown(self) -> None:
        return
