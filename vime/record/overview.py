"""Look through the records of a run, one file after the other: a line per rollout, and the samples asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vime.errors import UsageError
from vime.record.asked import Asked
from vime.record.fields import Fields
from vime.record.files import RecordFile
from vime.record.names import sample_id
from vime.record.reader import read
from vime.record.where import HINT, Expression
from vime.types import RolloutBatch, RolloutHeader

Measure = Callable[[RolloutBatch], dict[str, float]]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One file. ``problem`` says why it could not be read; the rest is empty then."""

    file: RecordFile
    rollout_id: int | None
    num_bytes: int = 0
    header: RolloutHeader = field(default_factory=RolloutHeader)
    statistics: dict[str, float] = field(default_factory=dict)
    problem: str = ""


@dataclass(slots=True)
class Overview:
    """``samples``: all fields of the first ``Asked.limit`` samples, and ``"sample"``, their name."""

    rollouts: list[Rollout] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    num_samples: int = 0
    num_matching: int = 0
    metadata_keys: set[str] = field(default_factory=set)

    @property
    def problems(self) -> list[str]:
        return [rollout.problem for rollout in self.rollouts if rollout.problem]


def overview(files: Sequence[RecordFile], asked: Asked, measure: Measure) -> Overview:
    """Read ``files``; ``measure`` makes the statistics of one rollout. Never more than one rollout is in memory.

    UsageError if the only file cannot be read, or the values of a sample do not fit the expressions; with several
    files, one that cannot be read is a ``Rollout.problem``.
    """
    found, kept = Overview(), _Kept(asked)
    for file in files:
        try:
            batch = read(file.path)
        except UsageError as error:
            if len(files) == 1:
                raise
            found.rollouts.append(Rollout(file, file.rollout_id, problem=error.message))
            continue
        size = file.path.stat().st_size
        found.rollouts.append(Rollout(file, batch.rollout_id, size, batch.header, measure(batch)))
        found.num_samples += len(batch)
        if asked.where and asked.where.metadata_keys:
            found.metadata_keys |= {key for row in batch.rows for key in row["metadata"]}
        found.num_matching += kept.add(Fields(batch))
    found.samples = kept.rows()
    return found


def matching(files: Sequence[RecordFile], where: Expression | None) -> Iterator[tuple[RolloutBatch, list[int]]]:
    """Every rollout with the numbers of its samples for which ``where`` is true, one rollout in memory at a time."""
    for file in files:
        batch = read(file.path)
        yield batch, where.matches(Fields(batch)) if where else list(range(len(batch)))


def find_sample(files: Sequence[RecordFile], name: str) -> list[tuple[RolloutBatch, int]]:
    """The samples called ``name`` ("3/1") in any of the files. UsageError if there is none, naming what is near."""
    found: list[tuple[RolloutBatch, int]] = []
    group_id, index = map(int, name.split("/"))
    groups: set[int] = set()
    indices: list[int] = []
    for file in files:
        batch = read(file.path)
        groups |= set(batch.group_ids_N.tolist())
        is_in_group = batch.group_ids_N == group_id
        indices += batch.indices_N[is_in_group].tolist()
        at = (is_in_group & (batch.indices_N == index)).nonzero()[0]
        found += [(batch, int(i)) for i in at]
    if found:
        return found
    if indices:
        raise UsageError(f"--sample {name}: prompt {group_id} has the samples {', '.join(map(str, sorted(indices)))}")
    there = f"{len(groups)} prompts, from {min(groups)} to {max(groups)}" if groups else "no samples at all"
    raise UsageError(f"--sample {name}: there is no prompt {group_id}; {there}")


class _Kept:
    """The first ``limit`` samples in the order asked for, while the files go by."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._kept: list[tuple[Any, dict[str, Any]]] = []

    def add(self, fields: Fields) -> int:
        """Take in one rollout; returns how many samples of it match."""
        asked = self._asked
        numbers = asked.where.matches(fields) if asked.where else list(range(len(fields)))
        keys = asked.sort.values(fields) if asked.sort else None
        ranked = self._ranked([(keys[i] if keys else None, i) for i in numbers])[: asked.limit]
        self._kept += [(key, _named(fields.row(i))) for key, i in ranked]
        self._kept = self._ranked(self._kept)[: asked.limit]
        return len(numbers)

    def rows(self) -> list[dict[str, Any]]:
        return [row for _, row in self._kept]

    def _ranked(self, entries: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """By key, those without one last; equal keys keep their order."""
        sort = self._asked.sort
        if sort is None:
            return entries
        having = [entry for entry in entries if not _is_nothing(entry[0])]
        try:
            having.sort(key=lambda entry: entry[0], reverse=self._asked.is_descending)
        except TypeError as error:
            raise UsageError(f"{sort.option} {sort.text}: its values cannot be put in order ({error})", HINT) from error
        return having + [entry for entry in entries if _is_nothing(entry[0])]


def _is_nothing(key: Any) -> bool:
    return key is None or (isinstance(key, float) and math.isnan(key))


def _named(row: dict[str, Any]) -> dict[str, Any]:
    return {"sample": sample_id(row["group_id"], row["index"]), **row}
