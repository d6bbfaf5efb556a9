"""What every parameter of a rank holds, against the files of its folder, read once more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vime.align.bench import LoadedParameter
from vime.backends.megatron import weights
from vime.backends.megatron.build import Model
from vime.weights.manifest import digest

Digests = Mapping[str, str]


def digests(model: Model) -> dict[str, str]:
    """Global Megatron name -> digest of what the parameter holds on this rank."""
    return {name: digest(parameter.data) for name, parameter in weights.named_parameters(model)}


def compare(model: Model, path: str, rank: int, of: str, initial: Digests) -> Iterator[LoadedParameter]:
    """Every parameter of this rank. ``initial``: its digest before loading, "" where nobody took it."""
    folder = weights.Folder(path)
    for name, parameter in weights.named_parameters(model):
        sources, expected = weights.in_files(model, folder, name, parameter)
        yield LoadedParameter(name, rank, digest(parameter.data), digest(expected), initial.get(name, ""), sources, of)
