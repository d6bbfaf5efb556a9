"""Tensors of a Hugging Face folder: names, shapes and dtypes from the safetensors headers alone, digests on demand."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vime.errors import UsageError
from vime.types import TensorEntry, WeightManifest
from vime.weights.manifest import build_manifest, layer_of

if TYPE_CHECKING:
    import torch

SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


def read_specs(folder: str | Path) -> list[TensorEntry]:
    """One entry per tensor of ``folder/*.safetensors``, without digests.

    Raises UsageError if there is none, or one is of a type that torch does not have.
    """
    folder = Path(folder)
    files = shard_files(folder)
    if not files:
        raise UsageError(f"model.path = {folder}: no *.safetensors file", "convert the checkpoint to safetensors")
    return [entry for file in files for entry in file_specs(file)]


def checkpoint_manifest(folder: str | Path, dtypes: Mapping[str, str], through: str | None = None) -> WeightManifest:
    """Digests of the tensors named in ``dtypes``, each converted to that dtype first, as an engine that loads them.

    ``through``: a type that they are rounded to before.

    Tensors that the folder does not have are left out. One tensor is in memory at a time.
    """
    import torch

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        from safetensors import safe_open

        for file in shard_files(Path(folder)):
            with safe_open(file, "pt") as weights:
                for name in weights.keys():  # noqa: SIM118 safe_open is no mapping
                    if name in dtypes:
                        tensor = weights.get_tensor(name)
                        rounded = tensor if through is None else tensor.to(getattr(torch, through))
                        yield name, rounded.to(getattr(torch, dtypes[name]))

    return build_manifest(0, "checkpoint", tensors())


def shard_files(folder: Path) -> list[Path]:
    """The *.safetensors files of a folder, those of its index where there is one; UsageError if one is not there."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{index}: is no index ({type(error).__name__}: {error})", "copy the model again"
            ) from None
        if strange := sorted(str(n) for n in names if not isinstance(n, str) or Path(n).name != n):
            raise UsageError(f"{index} names {strange[0]}, which is no file beside it", "copy the model again")
        missing = sorted(n for n in names if not (folder / n).exists())
        if missing:
            raise UsageError(f"{index} names files that do not exist: {', '.join(missing)}")
        return [folder / n for n in sorted(names)]
    return sorted(folder.glob("*.safetensors"))


def file_specs(file: Path) -> list[TensorEntry]:
    """Of one safetensors file, from its header. UsageError for a file that is none."""
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > os.fstat(stream.fileno()).st_size:
                raise ValueError(f"header of {size} bytes")
            header = json.loads(stream.read(size))
    except (OSError, ValueError, struct.error) as error:
        raise UsageError(f"{file}: no complete safetensors file ({error})", "copy or dump it again") from None
    for name, info in header.items():
        if name != "__metadata__" and info["dtype"] not in SAFETENSORS_DTYPES:
            rule = f"known: {', '.join(SAFETENSORS_DTYPES)}"
            raise UsageError(f"{file}: tensor {name} has the type {info['dtype']}; {rule}", "convert the checkpoint")
    return [
        TensorEntry(name, tuple(info["shape"]), SAFETENSORS_DTYPES[info["dtype"]], layer=layer_of(name)[1])
        for name, info in header.items()
        if name != "__metadata__"
    ]
