"""Names, shapes and dtypes of a Hugging Face folder, read from the safetensors headers alone."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from vime.errors import UsageError
from vime.types import TensorEntry
from vime.weights.manifest import layer_of

SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "U8": "uint8",
}


def read_specs(folder: str | Path) -> list[TensorEntry]:
    """One entry per tensor of ``folder/*.safetensors``, without digests. Raises UsageError if there is none."""
    folder = Path(folder)
    files = shard_files(folder)
    if not files:
        raise UsageError(f"model.path = {folder}: no *.safetensors file", "convert the checkpoint to safetensors")
    return [entry for file in files for entry in _header(file)]


def shard_files(folder: Path) -> list[Path]:
    """The *.safetensors files of a folder, those of its index where there is one; UsageError if one is not there."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = set(json.loads(index.read_text())["weight_map"].values())
        missing = sorted(n for n in names if not (folder / n).exists())
        if missing:
            raise UsageError(f"{index} names files that do not exist: {', '.join(missing)}")
        return [folder / n for n in sorted(names)]
    return sorted(folder.glob("*.safetensors"))


def _header(file: Path) -> list[TensorEntry]:
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(size))
    return [
        TensorEntry(name, tuple(info["shape"]), SAFETENSORS_DTYPES[info["dtype"]], layer=layer_of(name)[1])
        for name, info in header.items()
        if name != "__metadata__"
    ]
