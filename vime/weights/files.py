"""Dumps, manifests and Hugging Face folders as what can be compared; choosing tensors by layer and name."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.errors import UsageError
from vime.types import TensorEntry
from vime.weights.checkpoint import file_specs, read_specs, shard_files
from vime.weights.compare import Read, WeightDiff, diff
from vime.weights.dump import INDEX, FolderPlan, FolderWriter
from vime.weights.manifest import digest, layer_of
from vime.weights.manifest_file import SUFFIX, Dump, TensorRecord, manifests_in, read_dump
from vime.weights.shards import Shards
from vime.weights.shm import num_bytes
from vime.weights.values import record_of

if TYPE_CHECKING:
    import torch

BUFFERS = re.compile(r"rotary_emb\.inv_freq$")
"""Old Llama folders hold this buffer; it follows from config.json and is no weight."""
COPIED = "model-copied.safetensors"


@dataclass(frozen=True, slots=True)
class Opened:
    """One side of a comparison. read: its tensors, None where there are only digests."""

    path: Path
    dump: Dump
    read: Read | None


def open_dumps(path: Path) -> list[Opened]:
    """The dumps at ``path``: a manifest, every manifest of a dump folder, or a Hugging Face folder, digested now.

    Raises UsageError for what is none of them.
    """
    if path.is_dir():
        if found := list(manifests_in(path)):
            return [_of_manifest(file) for file in found]
        beside = path.with_name(path.name + SUFFIX)
        if beside.is_file():
            return [_of_manifest(beside)]
        return [_of_folder(path)]
    if not path.exists():
        raise UsageError(f"{path} does not exist", f"name a manifest (*{SUFFIX}), a dump, or a Hugging Face folder")
    if path.suffix == ".safetensors":
        raise UsageError(f"{path} is one file of tensors", "name its folder")
    return [_of_manifest(path)]


def compare_paths(a: Path, b: Path) -> list[WeightDiff]:
    """``b`` against ``a``: view by view where both have several, else each of the many with the one."""
    left, right = open_dumps(a), open_dumps(b)
    if len(left) > 1 and len(right) > 1:
        by_view = {side.dump.origin: side for side in right}
        pairs = [(side, by_view[side.dump.origin]) for side in left if side.dump.origin in by_view]
        if not pairs:
            views = [listed(side.dump.origin for side in sides) for sides in (left, right)]
            raise UsageError(f"{a} has the views {views[0]}, {b} has {views[1]}: none in common", "name two manifests")
    else:
        pairs = [(one, other) for one in left for other in right]
    return [diff(one.dump, other.dump, one.read, other.read) for one, other in pairs]


def _of_manifest(file: Path) -> Opened:
    dump = read_dump(file)
    return Opened(file, dump, None if dump.folder is None else _checked(dump, Shards(dump.folder)))


def _checked(dump: Dump, shards: Shards) -> Read:
    """Reads the tensors beside a manifest; UsageError for one that is not what the manifest says."""

    def read(name: str) -> torch.Tensor:
        tensor = shards.tensor(name) if name in shards else None
        if tensor is None or digest(tensor) != dump.tensors[name].digest:
            what = "is not there" if tensor is None else "has other bytes than its manifest says"
            raise UsageError(f"{dump.folder}: {name} {what}", "dump the weights again")
        return tensor

    return read


def _of_folder(folder: Path) -> Opened:
    read_specs(folder)  # UsageError where there are no tensors
    shards = Shards(folder)
    names = [name for name in shards.names() if not BUFFERS.search(name)]
    records = {name: record_of(name, shards.tensor(name)) for name in names}
    config = _config(folder)
    family, vocab_size = config.get("model_type", ""), config.get("vocab_size", 0)
    dump = Dump(
        version=0,
        origin=str(folder),
        tensors=records,
        family=family if isinstance(family, str) else "",
        model=str(folder),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        vocab_size=vocab_size if isinstance(vocab_size, int) else 0,
        folder=folder,
    )
    return Opened(folder, dump, shards.tensor)


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise UsageError(f"{file}: is not JSON ({error})", "a Hugging Face folder has one") from None
    return found if isinstance(found, dict) else {}


# ---------------------------------------------------------------- a folder's tensors


def folder_entries(folder: Path, dtype: str) -> list[TensorEntry]:
    """Every weight of a Hugging Face folder, in ``dtype``."""
    return [replace(entry, dtype=dtype) for entry in read_specs(folder) if not BUFFERS.search(entry.name)]


def folder_tensors(folder: Path, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of ``folder_entries``, one in memory at a time."""
    import torch
    from safetensors import safe_open

    for file in shard_files(folder):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 safe_open is no mapping
                if not BUFFERS.search(name):
                    yield name, weights.get_tensor(name).to(getattr(torch, dtype))


def copy_missing(origin: Path, entries: Sequence[TensorEntry], folder: Path | None) -> dict[str, TensorRecord]:
    """Records of tensors of ``origin``; ``folder``, complete without them, gets them and an index of all."""
    shards = Shards(origin)
    records = {e.name: record_of(e.name, shards.tensor(e.name), f"copied from {origin}") for e in entries}
    if folder is None or not entries:
        return records
    before = {e.name: (file.name, e) for file in shard_files(folder) for e in file_specs(file)}
    plan = FolderPlan({}, {}, {})
    plan.add(COPIED, entries)
    writer = FolderWriter(folder, plan)
    try:
        for entry in entries:
            writer.put(entry.name, shards.tensor(entry.name))
        writer.finish()
    finally:
        writer.close()
    total = sum(num_bytes(entry) for _, entry in before.values()) + sum(num_bytes(entry) for entry in entries)
    weight_map = {name: file for name, (file, _) in before.items()} | {entry.name: COPIED for entry in entries}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return records


# ---------------------------------------------------------------- choosing


def listed(names: Iterable[str], limit: int = 5) -> str:
    """The first few of ``names``."""
    first = list(names)
    rest = f" and {len(first) - limit} more" if len(first) > limit else ""
    return f"{', '.join(first[:limit])}{rest}" if first else "none"


def chosen(entries: Sequence[TensorEntry], layer: int | None, match: str | None) -> list[TensorEntry]:
    """Those of ``layer`` whose names ``match`` finds something in. UsageError, naming near ones, where none is left."""
    left = [entry for entry in entries if layer is None or layer_of(entry.name)[1] == layer]
    if not left:
        layers = sorted({found for e in entries if (found := layer_of(e.name)[1]) is not None})
        have = f"layers {layers[0]} to {layers[-1]}" if layers else "no layers"
        raise UsageError(f"--layer {layer}: the model has {have}")
    if match is None:
        return left
    try:
        pattern = re.compile(match)
    except re.error as error:
        hint = "'q_proj' finds every name that contains it"
        raise UsageError(f"--match {match!r} is no regular expression: {error}", hint) from None
    kept = [entry for entry in left if pattern.search(entry.name)]
    if not kept:
        names = [entry.name for entry in left]
        near = difflib.get_close_matches(re.sub(r"[^\w.]", "", match), names, n=3, cutoff=0.0)
        raise UsageError(f"--match {match!r} finds none of {len(names)} names", f"near ones: {', '.join(near)}")
    return kept
