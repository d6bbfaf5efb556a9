"""Digests of tensors, manifests of sets of tensors, and what differs between two manifests."""

from __future__ import annotations

import ctypes
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vime.types import TensorEntry, WeightManifest

if TYPE_CHECKING:
    import torch

PARALLEL_BYTES = 1 << 20  # larger tensors are digested by all cores: nothing else runs during a sync

_LAYER = re.compile(r"(?<=\.)(layers|h|blocks)\.(\d+)(?=\.)")


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference. kind: missing, unexpected, shape, dtype, value, permuted; ``name``: the tensor, or the layer."""

    kind: str
    name: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}: {self.detail}"


def layer_of(name: str) -> tuple[str, int | None]:
    """The name with its layer number replaced by ``*``, and that number (None for tensors outside the layers)."""
    found = _LAYER.search(name)
    if found is None:
        return name, None
    return name[: found.start(2)] + "*" + name[found.end(2) :], int(found.group(2))


def digest(tensor: torch.Tensor) -> str:
    """blake3, 64 hex digits, of the tensor's contiguous little-endian bytes."""
    from blake3 import blake3

    data = tensor.detach().cpu().contiguous()
    # Not Tensor.numpy(): it pins the storage's size for good, and a sleeping engine must free its weights.
    if data.numel() == 0:
        return blake3(b"").hexdigest()
    memory = (ctypes.c_ubyte * data.nbytes).from_address(data.data_ptr())
    threads = blake3.AUTO if data.nbytes >= PARALLEL_BYTES else 1
    return blake3(memoryview(memory).cast("B"), max_threads=threads).hexdigest()


def entry_of(name: str, tensor: torch.Tensor, source_name: str = "") -> TensorEntry:
    """The manifest entry of one tensor under its Hugging Face name."""
    import torch

    l2 = float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)) if tensor.is_floating_point() else 0.0
    return TensorEntry(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        digest=digest(tensor),
        l2=l2,
        source_name=source_name,
        layer=layer_of(name)[1],
    )


def build_manifest(
    version: int, origin: str, tensors: Iterable[tuple[str, torch.Tensor]], family: str = "", layout: str = ""
) -> WeightManifest:
    """The manifest of (name, tensor) pairs. Raises ValueError if a name comes twice."""
    entries: dict[str, TensorEntry] = {}
    for name, tensor in tensors:
        if name in entries:
            raise ValueError(f"{origin}: tensor {name} comes twice")
        entries[name] = entry_of(name, tensor)
    return WeightManifest(version, origin, entries, family, layout)


def manifest_digest(manifest: WeightManifest) -> str:
    """One digest for the whole set: names, shapes, dtypes and digests, in the order of the names.

    Empty where a tensor was not digested (weights.verify = "off").
    """
    from blake3 import blake3

    if not all(t.digest for t in manifest.tensors.values()):
        return ""
    rows = (f"{t.name} {t.shape} {t.dtype} {t.digest}\n" for _, t in sorted(manifest.tensors.items()))
    return blake3("".join(rows).encode()).hexdigest()


def compare(a: WeightManifest, b: WeightManifest) -> list[Difference]:
    """What ``b`` has wrong, taking ``a`` as right: every difference, permuted layers summed up in one line each."""
    return [*compare_specs(a.tensors, b.tensors, a.origin, b.origin), *_compare_values(a, b)]


def compare_specs(
    a: Mapping[str, TensorEntry], b: Mapping[str, TensorEntry], a_origin: str, b_origin: str
) -> list[Difference]:
    """Differences of names, shapes and dtypes alone."""
    found = [Difference("missing", n, f"in {a_origin}, not in {b_origin}") for n in a if n not in b]
    found += [Difference("unexpected", n, f"in {b_origin}, not in {a_origin}") for n in b if n not in a]
    for name, one, other in _common(a, b):
        if one.shape != other.shape:
            found.append(
                Difference("shape", name, f"{list(one.shape)} in {a_origin}, {list(other.shape)} in {b_origin}")
            )
        if one.dtype != other.dtype:
            found.append(Difference("dtype", name, f"{one.dtype} in {a_origin}, {other.dtype} in {b_origin}"))
    return found


def _common(
    a: Mapping[str, TensorEntry], b: Mapping[str, TensorEntry]
) -> Iterator[tuple[str, TensorEntry, TensorEntry]]:
    return ((name, one, b[name]) for name, one in a.items() if name in b)


def _compare_values(a: WeightManifest, b: WeightManifest) -> list[Difference]:
    wrong = [
        name
        for name, one, other in _common(a.tensors, b.tensors)
        if one.digest != other.digest and one.digest and other.digest
        if (one.shape, one.dtype) == (other.shape, other.dtype)
    ]
    permuted = _permuted_layers(a, b, wrong)
    in_permuted = {name for names in permuted.values() for name in names}
    found = [
        Difference(
            "permuted",
            f"layer {layer}",
            f"in {b.origin}, layer {layer} holds layer {other}'s tensors of {a.origin} "
            f"({len(names)} of {sum(layer_of(n)[1] == layer for n in wrong)} that differ)",
        )
        for (layer, other), names in sorted(permuted.items())
    ]
    return found + [
        Difference(
            "value",
            name,
            f"digest {a.tensors[name].digest[:12]} in {a.origin}, {b.tensors[name].digest[:12]} in {b.origin}",
        )
        for name in wrong
        if name not in in_permuted
    ]


def _permuted_layers(a: WeightManifest, b: WeightManifest, wrong: list[str]) -> dict[tuple[int, int], list[str]]:
    """Of the tensors that differ: (layer, other layer) -> those equal to the other layer's, largest match first."""
    owners: dict[tuple[str, str], list[int]] = defaultdict(list)
    for name, entry in a.tensors.items():
        kind, layer = layer_of(name)
        if layer is not None:
            owners[kind, entry.digest].append(layer)
    matches: dict[int, list[tuple[str, list[int]]]] = defaultdict(list)
    for name in wrong:
        kind, layer = layer_of(name)
        others = owners.get((kind, b.tensors[name].digest)) if layer is not None else None
        if layer is not None and others:
            matches[layer].append((name, others))
    permuted = {}
    for layer, found in matches.items():
        other, _ = Counter(o for _, others in found for o in others).most_common(1)[0]
        permuted[layer, other] = [name for name, others in found if other in others]
    return permuted
