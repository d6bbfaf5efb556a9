"""A stream of tensors digested and, where asked, written as a folder that Hugging Face loads; one tensor in memory.

Names, shapes and dtypes are known beforehand, so every byte has its place before the first tensor comes, in whatever
order they come, and the disk's room is checked first.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.errors import UsageError, VimeError
from vime.files import sync_folder
from vime.types import TensorEntry
from vime.weights.checkpoint import SAFETENSORS_DTYPES
from vime.weights.manifest_file import TensorRecord
from vime.weights.shm import num_bytes
from vime.weights.values import record_of

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 2 << 30
INDEX = "model.safetensors.index.json"
_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}

Tensors = Iterable[tuple[str, "torch.Tensor"]]
Hear = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor goes: the file and its first byte there."""

    file: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class FolderPlan:
    """The safetensors files of one folder. Plain data. headers: file -> its first bytes; sizes: file -> bytes."""

    places: dict[str, Place]
    headers: dict[str, bytes]
    sizes: dict[str, int]

    @classmethod
    def of(cls, entries: Sequence[TensorEntry], shard_bytes: int = SHARD_BYTES) -> FolderPlan:
        """In the order of ``entries``, in files of at most about ``shard_bytes``."""
        shards: list[list[TensorEntry]] = [[]]
        size = 0
        for entry in entries:
            if shards[-1] and size + num_bytes(entry) > shard_bytes:
                shards.append([])
                size = 0
            shards[-1].append(entry)
            size += num_bytes(entry)
        plan = cls({}, {}, {})
        for i, shard in enumerate(shards):
            name = f"model-{i + 1:05d}-of-{len(shards):05d}" if len(shards) > 1 else "model"
            plan.add(f"{name}.safetensors", shard)
        return plan

    def add(self, file: str, entries: Sequence[TensorEntry]) -> None:
        """One more file."""
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for entry in entries:
            end = at + num_bytes(entry)
            table[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.headers[file] = struct.pack("<Q", len(text)) + text
        self.sizes[file] = len(self.headers[file]) + at
        for entry in entries:
            begin, end = table[entry.name]["data_offsets"]
            self.places[entry.name] = Place(file, len(self.headers[file]) + begin, end - begin)

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes.values())

    def index(self) -> dict[str, Any]:
        """What ``model.safetensors.index.json`` says."""
        total = sum(place.num_bytes for place in self.places.values())
        return {
            "metadata": {"total_size": total},
            "weight_map": {name: place.file for name, place in self.places.items()},
        }


def require_room(folder: Path, needed: int) -> None:
    """VimeError, before anything is written, where the disk of ``folder`` has no room."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise VimeError(
            f"{folder} has {free / 1e6:.1f} MB free, the tensors need {needed / 1e6:.1f} MB",
            "choose another disk with --out, or take --digests-only",
        )


@contextmanager
def refused(path: Path) -> Iterator[None]:
    """The system's refusal to write below ``path`` as a VimeError."""
    try:
        yield
    except OSError as error:
        raise VimeError(f"{path} cannot be written: {error.strerror or error}", "is the disk full?") from error


class FolderWriter:
    """Writes tensors of a plan, in any order, below an existing folder. ``close`` in the end, whatever happens."""

    def __init__(self, folder: Path, plan: FolderPlan) -> None:
        self.folder, self.plan = folder, plan
        self._left = set(plan.places)
        self._files: dict[str, int] = {}
        try:
            for file, header in plan.headers.items():
                with refused(folder / file):
                    self._files[file] = os.open(folder / file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
                self._write(file, memoryview(header), 0)
        except BaseException:
            self.close()
            raise

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Raises VimeError if the disk refuses, KeyError for a tensor that was not planned."""
        place = self.plan.places[name]
        data = tensor.detach().cpu().contiguous()
        if data.nbytes != place.num_bytes:
            raise VimeError(f"{name}: {data.nbytes} bytes came, {place.num_bytes} were planned")
        if data.nbytes:
            memory = (ctypes.c_ubyte * data.nbytes).from_address(data.data_ptr())
            self._write(place.file, memoryview(memory).cast("B"), place.offset)
        self._left.discard(name)

    def _write(self, file: str, data: memoryview, at: int) -> None:
        with refused(self.folder / file):
            while len(data):
                done = os.pwrite(self._files[file], data, at)
                data, at = data[done:], at + done

    def finish(self) -> None:
        """Every planned tensor has come and is on the disk, with the index of more than one file."""
        if self._left:
            raise VimeError(f"{self.folder}: {len(self._left)} tensors never came, first {min(self._left)}")
        with refused(self.folder):
            if len(self._files) > 1:
                (self.folder / INDEX).write_text(json.dumps(self.plan.index(), indent=2) + "\n", encoding="utf-8")
            for descriptor in self._files.values():
                os.fsync(descriptor)

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])


@dataclass
class Recorder:
    """Passes a stream on, digests each tensor, and writes it where a writer is given.

    entries  the tensors to look at; others pass. hear: told the bytes done so far
    """

    entries: Sequence[TensorEntry]
    writer: FolderWriter | None = None
    hear: Hear = lambda done: None
    records: dict[str, TensorRecord] = field(default_factory=dict)
    _done: int = 0

    def through(self, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Raises ValueError if a name comes twice."""
        chosen = {entry.name for entry in self.entries}
        for name, tensor in tensors:
            if name in chosen:
                self.take(name, tensor)
            yield name, tensor

    def take(self, name: str, tensor: torch.Tensor, how: str = "bytes") -> None:
        """One tensor. Raises ValueError if it was taken before."""
        if name in self.records:
            raise ValueError(f"tensor {name} comes twice")
        if self.writer is None:
            self.records[name] = record_of(name, tensor, how)
        else:
            with ThreadPoolExecutor(1) as side:  # the disk takes a tensor while its digest is computed
                written = side.submit(self.writer.put, name, tensor)
                self.records[name] = record_of(name, tensor, how)
                written.result()
        self._done += tensor.nbytes
        self.hear(self._done)


def tell_progress(file: str | None) -> Hear:
    """For another process: the bytes done so far, as text in ``file``; None: nobody asks."""
    if file is None:
        return lambda done: None

    def hear(done: int) -> None:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, f"{done:20d}".encode(), 0)
        finally:
            os.close(descriptor)

    return hear


def record_stream(
    tensors: Tensors,
    entries: Sequence[TensorEntry],
    folder: Path | None = None,
    hear: Hear = lambda done: None,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, TensorRecord]:
    """Digest the tensors named in ``entries``; ``folder``, which exists and is empty, gets them as safetensors."""
    writer = None if folder is None else FolderWriter(folder, FolderPlan.of(entries, shard_bytes))
    try:
        recorder = Recorder(entries, writer, hear)
        for _ in recorder.through(tensors):
            pass
        if writer is not None:
            writer.finish()
        return recorder.records
    finally:
        if writer is not None:
            writer.close()


def copy_beside(source: Path, folder: Path, dtype: str) -> None:
    """config.json (with the dtype of the tensors), tokenizer and generation settings of a Hugging Face folder."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    with refused(folder):
        for file in sorted(source.iterdir()):
            is_weights = file.suffix in _WEIGHTS or file.name.endswith(".index.json")
            if file.is_file() and not is_weights and not file.name.startswith(".") and file.name != "config.json":
                shutil.copyfile(file, folder / file.name)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def require_absent(path: Path) -> None:
    """UsageError where something has that name, be it a link to nothing."""
    if os.path.lexists(path):
        raise UsageError(f"{path} exists already", "choose another --out, or remove it")


def unfinished(final: Path) -> Path:
    """Where ``final`` is written until all of it is on the disk."""
    return final.with_name(f".{final.name}.writing")


@contextmanager
def held_alone(folder: Path) -> Iterator[None]:
    """No other process dumps into ``folder``, which exists, meanwhile; UsageError where one does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "choose another folder with --out"
            raise UsageError(f"--out {folder}: another dump writes there", hint) from None
        yield
    finally:
        os.close(descriptor)


def writing_folder(final: Path) -> Path:
    """A fresh folder beside ``final`` to write in; ``put_in_place`` gives it its name. UsageError where it exists."""
    require_absent(final)
    folder = unfinished(final)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise VimeError(f"{folder} cannot be made: {error.strerror}", "choose another --out") from error
    return folder


def put_in_place(written: Path, final: Path) -> None:
    """The folder gets its name when all of it is on the disk."""
    with refused(final):
        sync_folder(written)
        written.rename(final)
        sync_folder(final.parent)
