"""Whole tensors in a folder of safetensors files, written and read one by one: never all of them in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.errors import UsageError, VimeError
from vime.weights.checkpoint import shard_files

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 256 << 20


def written(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int = SHARD_BYTES
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass ``tensors`` on, and write them below ``folder``, which is made, in files of at most about ``shard_bytes``.

    The last file is complete when the iteration has ended. Raises VimeError if the disk refuses.
    """
    folder.mkdir(parents=True)
    held: dict[str, torch.Tensor] = {}
    num_bytes = num_files = 0
    for name, tensor in tensors:
        if held and num_bytes + tensor.nbytes > shard_bytes:
            _write(folder, num_files, held)
            held, num_bytes, num_files = {}, 0, num_files + 1
        held[name] = tensor
        num_bytes += tensor.nbytes
        yield name, tensor
    if held:
        _write(folder, num_files, held)


def _write(folder: Path, number: int, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, folder / f"{number:05d}.safetensors", metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise VimeError(f"{folder}: tensors could not be written ({error})", "is the disk full?") from error


class Shards:
    """The tensors of a folder by name; a tensor is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        """Raises UsageError for a file that is no complete safetensors file."""
        from safetensors import SafetensorError, safe_open

        self._of: dict[str, Any] = {}
        for file in shard_files(folder):
            try:
                handle = safe_open(file, "pt")
            except (OSError, SafetensorError) as error:
                raise UsageError(f"{file}: no complete safetensors file ({error})", "copy or dump it again") from error
            self._of.update(dict.fromkeys(handle.keys(), handle))

    def names(self) -> list[str]:
        return list(self._of)

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def tensor(self, name: str) -> torch.Tensor:
        """Raises KeyError for a name that is not there."""
        return self._of[name].get_tensor(name)
