"""Rows at the wrong place inside the tensors that a model fuses: query, key and value; gate and up.

A tensor-parallel rank of a fused matrix holds its part of every one of the parts. Where shards are joined in plain rank
order, ``[g0 u0 g1 u1]`` is read as ``[g0 g1 u0 u1]``: the right shape, the right multiset of rows, the wrong rows.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vime.weights.manifest_file import TensorRecord

TP_SIZES = (2, 4, 8, 16)
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
LABELS = {"q_proj": "qkv", "gate_proj": "gate/up"}
_PART = re.compile(r"\b(q_proj|k_proj|v_proj|gate_proj|up_proj)\b")


@dataclass(frozen=True, slots=True)
class Rows:
    """Block digests of one fused matrix, part after part. sizes: blocks of each part."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    digests: tuple[str, ...]


def fused_groups(names: Mapping[str, TensorRecord]) -> list[tuple[str, ...]]:
    """Names that a fused matrix is made of, in its order; groups that are not whole are left out."""
    found: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for name in names:
        if (part := _PART.search(name)) is not None:
            group = next(g for g in FUSED if part[1] in g)
            found[_PART.sub("*", name), group[0]][part[1]] = name
    return [
        tuple(parts[p] for p in next(g for g in FUSED if g[0] == first))
        for (_, first), parts in found.items()
        if len(parts) == len(next(g for g in FUSED if g[0] == first))
    ]


def joined(records: Mapping[str, TensorRecord], names: Sequence[str]) -> Rows | None:
    """None where rows were not digested, or in blocks of different sizes."""
    parts = [records[name] for name in names]
    blocks = {part.block for part in parts}
    if len(blocks) != 1 or not parts[0].rows:
        return None
    return Rows(tuple(names), tuple(len(p.rows) for p in parts), tuple(d for p in parts for d in p.rows))


def explain(a: Rows, b: Rows) -> str:
    """In words, how the rows of ``b`` come from those of ``a``; empty where they are not the same rows."""
    if a.sizes != b.sizes or a.digests == b.digests or Counter(a.digests) != Counter(b.digests):
        return ""
    what = next((label for part, label in LABELS.items() if part in a.names[0]), "fused matrix")
    for tp in TP_SIZES:
        if any(size % tp for size in a.sizes):
            continue
        if len(a.sizes) > 1 and b.digests == _plain_order(a, tp):
            either = f", or {tp} key/value groups not split back" if len(a.sizes) == 3 else ""
            return f"{what}: shards of tp = {tp} joined in plain rank order, each of them fused itself{either}"
        if (moved := _moved_shards(a, b, tp)) is not None:
            return f"{what}: shards of tp = {tp} in the order of ranks {moved}"
    if len(a.sizes) == 3 and (groups := _interleaved(a, b)):
        return f"{what}: interleaved by {groups} key/value groups, not split back"
    num = sum(one != other for one, other in zip(a.digests, b.digests, strict=True))
    return f"{what}: the same rows in another order ({num} of {len(a.digests)} blocks of rows)"


def _parts(rows: Rows) -> list[tuple[str, ...]]:
    found, at = [], 0
    for size in rows.sizes:
        found.append(rows.digests[at : at + size])
        at += size
    return found


def _chunks(part: Sequence[str], count: int) -> list[Sequence[str]]:
    size = len(part) // count
    return [part[i * size : (i + 1) * size] for i in range(count)]


def _plain_order(rows: Rows, tp: int) -> tuple[str, ...]:
    """Rank after rank, of every rank its part of each part."""
    shards = [_chunks(part, tp) for part in _parts(rows)]
    return tuple(d for rank in range(tp) for part in shards for d in part[rank])


def _interleaved(a: Rows, b: Rows) -> int:
    """The number of key/value groups, if ``b`` lies as a matrix that is fused group by group."""
    size = a.sizes[1]
    return next((n for n in range(2, size + 1) if size % n == 0 and b.digests == _plain_order(a, n)), 0)


def _moved_shards(a: Rows, b: Rows, tp: int) -> list[int] | None:
    """The ranks whose shards ``b`` holds one after the other, the same in every part; None: it is something else."""
    orders = []
    for one, other in zip(_parts(a), _parts(b), strict=True):
        shards = [tuple(c) for c in _chunks(one, tp)]
        held = [tuple(c) for c in _chunks(other, tp)]
        if len(set(shards)) < tp or any(shard not in shards for shard in held):
            return None
        orders.append([shards.index(shard) for shard in held])
    return orders[0] if all(order == orders[0] for order in orders) else None


def differing_shard(a: TensorRecord, b: TensorRecord) -> str:
    """``rows 32..63 of 64`` where only one stretch of rows differs: what one rank holds. Empty: all, or none known."""
    if not a.rows or a.block != b.block or len(a.rows) != len(b.rows):
        return ""
    wrong = [i for i, (one, other) in enumerate(zip(a.rows, b.rows, strict=True)) if one != other]
    if not wrong or len(wrong) == len(a.rows):
        return ""
    first, last = wrong[0] * a.block, (wrong[-1] + 1) * a.block - 1
    text = f"rows {first}..{last} of {a.shape[0]} differ"
    for tp in TP_SIZES:
        shard = len(a.rows) // tp
        if (
            shard
            and len(a.rows) % tp == 0
            and wrong == list(range(wrong[0], wrong[0] + shard))
            and wrong[0] % shard == 0
        ):
            return f"{text}: the shard of rank {wrong[0] // shard} at tp = {tp}"
    return text
