"""A file in shared memory that carries one set of weights from the trainer to every engine of the machine."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from vime.errors import VimeError
from vime.types import TensorEntry, WeightManifest
from vime.weights.manifest import digest, layer_of

if TYPE_CHECKING:
    import torch

SHARED_MEMORY = "/dev/shm"
ALIGNMENT = 64  # bytes; a cache line, and enough for every vector load

DTYPE_BYTES = {
    **dict.fromkeys(("float64", "int64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
}


def num_bytes(entry: TensorEntry) -> int:
    """Bytes of the tensor's elements."""
    size = DTYPE_BYTES[entry.dtype]
    for n in entry.shape:
        size *= n
    return size


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """Where each tensor lies: ``offsets[i]`` is the first byte of ``entries[i]``. Plain data."""

    entries: tuple[TensorEntry, ...]
    offsets: tuple[int, ...]
    num_bytes: int

    @classmethod
    def of(cls, entries: Sequence[TensorEntry]) -> BufferPlan:
        offsets = []
        at = 0
        for entry in entries:
            offsets.append(at)
            at += -(-num_bytes(entry) // ALIGNMENT) * ALIGNMENT
        return cls(tuple(entries), tuple(offsets), at)


def batches(entries: Sequence[TensorEntry], max_bytes: int) -> Iterator[list[TensorEntry]]:
    """The entries in their order, as many at a time as fit in ``max_bytes``, at least one."""
    batch: list[TensorEntry] = []
    for entry in entries:
        if batch and sum(map(num_bytes, batch)) + num_bytes(entry) > max_bytes:
            yield batch
            batch = []
        batch.append(entry)
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class WritePlan:
    """What the trainer needs to write one version: the layout, the file, the version. Plain data."""

    buffer: BufferPlan
    path: str
    version: int
    is_digested: bool = True


def write_weights(plan: WritePlan, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
    """In the trainer's process: write whole tensors, in the planned order, into the shared file."""
    buffer = SharedBuffer.attach(plan.path, plan.buffer.num_bytes)
    try:
        return buffer.write(plan.buffer, tensors, plan.version, is_digested=plan.is_digested)
    finally:
        buffer.close()


def lock(path: str | Path) -> int:
    """Lock a file or folder for as long as this process lives, or the returned descriptor is open.

    Whoever can take the lock knows that the process which left ``path`` behind is gone, whatever killed it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


class SharedBuffer:
    """The mapped file. ``create`` in one process, ``attach`` in the others; the creator calls ``unlink``."""

    def __init__(self, path: str, size: int, memory: mmap.mmap) -> None:
        self.path = path
        self.num_bytes = size
        self._memory: mmap.mmap | None = memory
        self._lock: int | None = None

    @classmethod
    def create(cls, size: int, directory: str = SHARED_MEMORY) -> Self:
        """A new file of ``size`` bytes. Raises VimeError where the directory has no room: nothing is put elsewhere."""
        size = max(size, ALIGNMENT)
        stat = os.statvfs(directory)
        free = stat.f_bavail * stat.f_frsize
        if free < size:
            raise VimeError(
                f"{directory} has {free / 1e6:.1f} MB free, the weights need {size / 1e6:.1f} MB",
                "enlarge it: mount -o remount,size=... /dev/shm, or docker run --shm-size",
            )
        path = str(Path(directory) / f"vime-run-weights-{os.getpid()}-{uuid.uuid4().hex[:8]}")
        with open(path, "xb") as file:
            descriptor = lock(path)
            try:
                os.chmod(path, 0o600)
                os.posix_fallocate(file.fileno(), 0, size)  # a sparse file would be a SIGBUS later
                buffer = cls.attach(path, size)
            except OSError as error:
                os.unlink(path)
                os.close(descriptor)
                raise VimeError(f"{path}: {size / 1e6:.1f} MB cannot be had: {error.strerror}") from error
        buffer._lock = descriptor
        return buffer

    @classmethod
    def attach(cls, path: str, size: int) -> Self:
        """Map an existing file. Raises VimeError if it is missing or shorter than ``size`` bytes."""
        if not os.path.exists(path):
            raise VimeError(f"shared weights file {path} does not exist", "trainer and engines must be on one machine")
        if os.path.getsize(path) < size:
            raise VimeError(f"shared weights file {path} has {os.path.getsize(path)} bytes, expected {size}")
        with open(path, "r+b") as file:
            return cls(path, size, mmap.mmap(file.fileno(), os.path.getsize(path)))

    def view(self, entry: TensorEntry, offset: int) -> torch.Tensor:
        """The tensor at ``offset``, without a copy. It must not outlive ``close``."""
        import torch

        assert self._memory is not None, "buffer is closed"
        count = num_bytes(entry) // DTYPE_BYTES[entry.dtype]
        dtype = getattr(torch, entry.dtype)
        if count == 0:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).view(entry.shape)

    def views(self, plan: BufferPlan) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Every tensor of the plan, in its order."""
        return ((e, self.view(e, o)) for e, o in zip(plan.entries, plan.offsets, strict=True))

    def round_to_bfloat16(self, plan: BufferPlan) -> None:
        """Every float32 tensor to the nearest bfloat16, in place: what a cast on the way would do."""
        import torch

        for entry, tensor in self.views(plan):
            if entry.dtype == "float32":
                tensor.copy_(tensor.to(torch.bfloat16))

    def write(
        self,
        plan: BufferPlan,
        tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        origin: str = "trainer",
        is_digested: bool = True,
    ) -> WeightManifest:
        """Copy the tensors in and digest each as it lies in the buffer. They must be the plan's, in its order.

        Raises VimeError naming the first tensor whose name, shape or dtype is not the planned one, or that is missing.
        """
        written: dict[str, TensorEntry] = {}
        seconds = 0.0
        stream = iter(tensors)
        for entry, target in self.views(plan):
            name, tensor = next(stream, (None, None))
            if tensor is None:
                raise VimeError(f"weights end after {len(written)} tensors, before {entry.name}")
            got = (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            if got != (entry.name, entry.shape, entry.dtype):
                raise VimeError(f"tensor {len(written)} is {got}, planned {(entry.name, entry.shape, entry.dtype)}")
            target.copy_(tensor.detach())
            began = time.perf_counter()
            found = digest(target) if is_digested else ""
            seconds += time.perf_counter() - began
            written[entry.name] = TensorEntry(
                entry.name, entry.shape, entry.dtype, found, 0.0, entry.source_name, layer_of(entry.name)[1]
            )
        extra = next(stream, None)
        if extra is not None:
            raise VimeError(f"weights go on after the {len(written)} planned tensors with {extra[0]}")
        return WeightManifest(version, origin, written, seconds=seconds)

    def close(self) -> None:
        """Let go of the memory; it stays mapped until the last view is gone (torch keeps the object, not a lock)."""
        self._memory = None

    def unlink(self) -> None:
        """Remove the file; mapped processes keep their view."""
        Path(self.path).unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
