"""Write the policy as a Hugging Face folder that transformers and vLLM load."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from vime.backends.megatron import manifest, weights
from vime.backends.megatron.build import Model
from vime.errors import VimeError

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


def write(model: Model, source: str, dtype: str, path: str) -> None:
    """config.json and tokenizer files of ``source`` with the model's weights. A collective; rank 0 writes.

    The folder gets its name, and replaces an older one, when all of it is on disk.
    """
    tensors = {name: tensor for name, tensor in weights.export(model) if dist.get_rank() == 0}
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            _write(tensors, Path(source), dtype, Path(path))
        except (OSError, SafetensorError) as error:
            outcome = [VimeError(f"{path}: the Hugging Face folder could not be written ({error})")]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise outcome[0]


def _write(tensors: dict[str, Tensor], source: Path, dtype: str, path: Path) -> None:
    writing = manifest.temporary(path)
    writing.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        is_weights = file.suffix in _WEIGHTS or file.name.endswith(".index.json")
        if file.is_file() and not is_weights and not file.name.startswith(".") and file.name != "config.json":
            shutil.copyfile(file, writing / file.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    manifest.write_json(writing / "config.json", config)
    save_file(tensors, writing / "model.safetensors", metadata={"format": "pt"})
    with open(writing / "model.safetensors", "rb+") as file_on_disk:
        os.fsync(file_on_disk.fileno())
    manifest.put_in_place(writing, path)
