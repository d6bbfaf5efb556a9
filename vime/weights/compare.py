"""Two dumps of weights compared tensor by tensor, and what the differences come from. Works on manifests alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vime.errors import UsageError
from vime.weights.difference import Finding, Kind, TensorDiff, WeightDiff
from vime.weights.grouping import EXPERT, group_partners, group_rows
from vime.weights.manifest import layer_of
from vime.weights.manifest_file import EMBEDDING, LM_HEAD, NOT_TESTED, Dump, TensorRecord
from vime.weights.rows import differing_shard
from vime.weights.values import Gap, gap

if TYPE_CHECKING:
    import torch

Read = Callable[[str], "torch.Tensor"]
BF16_STEP = 2.0**-7  # relative; rounding or cutting off moves no element further


def diff(a: Dump, b: Dump, read_a: Read | None = None, read_b: Read | None = None) -> WeightDiff:
    """Every difference of ``b`` from ``a``. ``read_*``: the tensors, where they are at hand.

    UsageError where the two are of different families, or have no tensor in common.
    """
    if a.family and b.family and a.family != b.family:
        raise UsageError(
            f"{a.origin} is of family {a.family}, {b.origin} of {b.family}: there is nothing to compare",
            "name two dumps of one model",
        )
    if not a.tensors.keys() & b.tensors.keys():
        raise UsageError(
            f"{a.origin} ({len(a.tensors)} tensors) and {b.origin} ({len(b.tensors)}) have no name in common",
            f"names are {_first(a.tensors)} and {_first(b.tensors)}",
        )
    reader = _Reader(read_a, read_b)
    rows = {row.name: row for row in _rows(a, b, reader)}
    notes = [*_notes(a, b), *_tied_notes(a, b, rows)]
    findings = [*group_partners(rows), *group_rows(a, b, rows), *_untied(a, b)]
    explained = {name for found in findings for name in found.tensors}
    findings += [
        _single(row)
        for row in rows.values()
        if row.kind not in (Kind.EQUAL, Kind.UNTESTED) and row.name not in explained
    ]
    buffers = tuple(_buffers(a, b))
    findings += [Finding(Kind.BUFFER, row.name, row.detail, (row.name,)) for row in buffers]
    order = list(Kind)
    findings.sort(key=lambda f: order.index(f.kind))
    return WeightDiff(a, b, tuple(rows.values()), tuple(findings), tuple(notes), buffers)


def _first(names: Any) -> str:
    return next(iter(names), "none")


@dataclass(frozen=True, slots=True)
class _Reader:
    """Asks for tensors where both sides have them."""

    a: Read | None
    b: Read | None

    def gap(self, name: str) -> Gap | None:
        return None if self.a is None or self.b is None else gap(self.a(name), self.b(name))

    def is_transposed(self, name: str) -> bool:
        if self.a is None or self.b is None:
            return False
        one, other = self.a(name), self.b(name)
        return one.ndim == 2 and one.shape == other.shape[::-1] and bool((one.t() == other).all())

    @property
    def has_both(self) -> bool:
        return self.a is not None and self.b is not None

    def is_start(self, name: str) -> bool:
        """The rows of ``a`` are the first rows of ``b``."""
        assert self.a is not None and self.b is not None  # noqa: PT018
        one, other = self.a(name), self.b(name)
        return bool((one == other[: one.shape[0]]).all())

    def moved_columns(self, name: str) -> int:
        """The tp size whose shards lie in another order along the second axis; 0: they do not."""
        if self.a is None or self.b is None:
            return 0
        one, other = self.a(name), self.b(name)
        for tp in (2, 4, 8):
            if one.ndim != 2 or one.shape[1] % tp:
                continue
            shards, held = one.chunk(tp, 1), other.chunk(tp, 1)
            if all(any(bool((h == s).all()) for s in shards) for h in held):
                return tp
        return 0


def _rows(a: Dump, b: Dump, reader: _Reader) -> Iterator[TensorDiff]:
    is_partial = a.selection != b.selection
    renamed = _renamed(a, b)
    owners, new_names = _owners(a), set(renamed.values())
    for name, one in a.tensors.items():
        other = b.tensors.get(name)
        if other is not None:
            yield _compared(name, one, other, owners, reader)
        elif name in renamed:
            yield TensorDiff(name, Kind.RENAMED, f"is called {renamed[name]} in {b.origin}", one, None, renamed[name])
        elif not is_partial and not _is_tied_head(a, b, name):
            yield TensorDiff(name, Kind.MISSING, f"in {a.origin}, not in {b.origin}", one)
    for name, other in b.tensors.items():
        if name not in a.tensors and name not in new_names and not is_partial and not _is_tied_head(b, a, name):
            yield TensorDiff(name, Kind.EXTRA, f"in {b.origin}, not in {a.origin}", None, other)


def _renamed(a: Dump, b: Dump) -> dict[str, str]:
    """Names of ``a`` that ``b`` lacks -> names of ``b`` that ``a`` lacks, with the same bytes, both the only ones."""
    extra: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, record in b.tensors.items():
        if name not in a.tensors and record.digest and not record.is_constant:
            extra[_key(record)].append(name)
    lost: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, record in a.tensors.items():
        if name not in b.tensors and record.digest and not record.is_constant:
            lost[_key(record)].append(name)
    return {names[0]: extra[key][0] for key, names in lost.items() if len(names) == len(extra.get(key, [])) == 1}


def _key(record: TensorRecord) -> tuple[Any, ...]:
    return record.shape, record.dtype, record.digest


def _owners(a: Dump) -> dict[tuple[Any, ...], list[str]]:
    owners: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, record in a.tensors.items():
        if record.digest and not record.is_constant:  # norms that are all ones are alike everywhere
            owners[_key(record)].append(name)
    return owners


def _is_tied_head(has: Dump, lacks: Dump, name: str) -> bool:
    """``lm_head`` repeats the embedding, and the other side leaves it out."""
    if name != LM_HEAD or EMBEDDING not in has.tensors or EMBEDDING not in lacks.tensors:
        return False
    return has.tensors[LM_HEAD].digest == has.tensors[EMBEDDING].digest


def _compared(
    name: str, one: TensorRecord, other: TensorRecord, owners: dict[tuple[Any, ...], list[str]], reader: _Reader
) -> TensorDiff:
    row = TensorDiff(name, Kind.EQUAL, "", one, other)
    if one.shape != other.shape:
        return _other_shape(row, one, other, reader)
    if one.dtype != other.dtype:
        return replace(row, kind=Kind.DTYPE, detail=_drift(one, other), gap=reader.gap(name))
    if not one.digest or not other.digest:
        return replace(row, kind=Kind.UNTESTED, detail=one.how if other.digest else other.how)
    if one.digest == other.digest:
        return row
    row = replace(row, gap=reader.gap(name))
    if other.num_nonfinite > one.num_nonfinite:
        return replace(row, kind=Kind.NONFINITE, detail=f"{other.num_nonfinite} of {other.numel} elements")
    if partners := [p for p in owners.get(_key(other), []) if p != name]:
        partner = min(partners, key=lambda p: _distance(name, p))
        return replace(row, kind=Kind.SWAPPED, detail=f"holds {partner}", partner=partner)
    if other.is_zero:
        return replace(row, kind=Kind.ZERO, detail=f"all {other.numel} elements are 0")
    if other.is_constant and not one.is_constant:
        return replace(row, kind=Kind.CONSTANT, detail=f"all {other.numel} elements are {other.minimum:g}")
    return _other_values(row, one, other, reader)


def _distance(name: str, other: str) -> tuple[bool, bool, str]:
    """Partners of the same kind in another layer before those of another kind."""
    kind, _ = layer_of(name)
    other_kind, _ = layer_of(other)
    return EXPERT.sub("*", kind) != EXPERT.sub("*", other_kind), kind != other_kind, other


def _other_shape(row: TensorDiff, one: TensorRecord, other: TensorRecord, reader: _Reader) -> TensorDiff:
    shapes = f"{list(one.shape)} -> {list(other.shape)}"
    is_turned = one.shape == other.shape[::-1] and len(one.shape) == 2
    if is_turned and reader.is_transposed(row.name):
        return replace(row, kind=Kind.TRANSPOSED, detail=f"{shapes} (element by element)")
    if is_turned and _same_elements(one, other):
        return replace(row, kind=Kind.TRANSPOSED, detail=shapes)
    if row.name in (LM_HEAD, EMBEDDING) and one.shape[1:] == other.shape[1:] and other.shape[0] > one.shape[0]:
        extra = other.shape[0] - one.shape[0]
        is_same = reader.is_start(row.name) if reader.has_both else _starts_with(one, other)
        others = {True: "", False: "; other rows differ too", None: "; of the others the digests tell nothing"}[is_same]
        return replace(row, kind=Kind.PADDED, detail=f"{shapes}: {extra} rows of padding were not cut off{others}")
    return replace(row, kind=Kind.SHAPE, detail=shapes)


def _starts_with(one: TensorRecord, other: TensorRecord) -> bool | None:
    """Whether the rows of ``one`` are the first of ``other``, all others being zero; None: unknown."""
    if one.rows and one.block == other.block:
        return other.rows[: len(one.rows)] == one.rows
    return True if _same_elements(one, other) else None


def _drift(one: TensorRecord, other: TensorRecord) -> str:
    text = f"{one.dtype} -> {other.dtype}"
    near = _near(one, other, 1e-2)
    return f"{text}, norm and extremes close" if near else f"{text}, l2 {one.l2:.6g} -> {other.l2:.6g}"


def _near(one: TensorRecord, other: TensorRecord, relative: float) -> bool:
    pairs = ((one.l2, other.l2), (one.minimum, other.minimum), (one.maximum, other.maximum))
    return all(abs(x - y) <= relative * abs(x) for x, y in pairs)


def _is_rounded(one: TensorRecord, other: TensorRecord, found: Gap | None) -> bool:
    """``other`` is ``one`` after bfloat16: all its elements are of that type, and none is further off than a step."""
    if not other.is_bf16 or one.is_bf16 or not _near(one, other, BF16_STEP):
        return False
    return found is None or found.relative_l2 <= BF16_STEP


def _other_values(row: TensorDiff, one: TensorRecord, other: TensorRecord, reader: _Reader) -> TensorDiff:
    if _is_rounded(one, other, row.gap):
        return replace(row, kind=Kind.ROUNDED, detail="every element is what bfloat16 can hold: it went through it")
    if _same_elements(one, other):
        return replace(row, kind=Kind.ELEMENTS, detail=_moved(row.name, one, other, reader))
    where = differing_shard(one, other)
    size = f"l2 {one.l2:.6g} -> {other.l2:.6g}" if row.gap is None else _gap_text(row.gap)
    return replace(row, kind=Kind.VALUE, detail=f"{where}; {size}" if where else size)


def _gap_text(found: Gap) -> str:
    return f"max |difference| {found.max_abs:.3g}, relative L2 {found.relative_l2:.3g}, cosine {found.cosine:.6f}"


def _same_elements(one: TensorRecord, other: TensorRecord) -> bool:
    """In whatever order."""
    return bool(one.bag) and (one.dtype, one.bag) == (other.dtype, other.bag)


def _moved(name: str, one: TensorRecord, other: TensorRecord, reader: _Reader) -> str:
    if reader.is_transposed(name):
        return "transposed (square)"
    if one.rows and Counter(one.rows) == Counter(other.rows):
        return "the same rows in another order"
    if tp := reader.moved_columns(name):
        return f"columns: shards of tp = {tp} in another order of ranks"
    likely = "transposed, or " if len(one.shape) == 2 and one.shape[0] == one.shape[1] else ""
    return f"the same elements at other places: {likely}columns or rows in another order"


def _single(row: TensorDiff) -> Finding:
    return Finding(row.kind, row.name, row.detail, (row.name,))


# ---------------------------------------------------------------- tied, buffers, notes


def _untied(a: Dump, b: Dump) -> list[Finding]:
    """``b`` says its embeddings are tied and holds two; ``a`` does not."""
    if not b.is_tied or _heads_agree(b) or not _heads_agree(a):
        return []
    return [Finding(Kind.TIED, LM_HEAD, f"tied, but in {b.origin} it is not the embedding's bytes", (LM_HEAD,))]


def _heads_agree(dump: Dump) -> bool:
    head = dump.tensors.get(LM_HEAD)
    return head is None or EMBEDDING not in dump.tensors or head.digest == dump.tensors[EMBEDDING].digest


def _tied_notes(a: Dump, b: Dump, rows: dict[str, TensorDiff]) -> list[str]:
    sides = [(has, lacks) for has, lacks in ((a, b), (b, a)) if LM_HEAD in has.tensors and LM_HEAD not in lacks.tensors]
    return [
        f"tied embeddings: {LM_HEAD} of {has.origin} repeats {EMBEDDING}, {lacks.origin} leaves it out"
        for has, lacks in sides
        if _is_tied_head(has, lacks, LM_HEAD)
    ]


def _notes(a: Dump, b: Dump) -> Iterator[str]:
    if a.selection != b.selection:
        sides = " and ".join(f"{d.origin}: {d.selection or 'all tensors'}" for d in (a, b))
        yield f"only the tensors that both have are compared ({sides})"
    if a.version != b.version:
        yield f"weight version {a.version} of {a.origin}, {b.version} of {b.origin}"
    for dump in (a, b):
        if unread := [record for record in dump.tensors.values() if not record.digest]:
            first = f"first {unread[0].name}: {unread[0].how.removeprefix(NOT_TESTED + ': ')}"
            yield f"NOT TESTED: {len(unread)} tensors of {dump.origin}, {first}"


def _buffers(a: Dump, b: Dump) -> Iterator[TensorDiff]:
    if not a.buffers or not b.buffers:
        return
    for name, one in a.buffers.items():
        other = b.buffers.get(name)
        if other is None:
            yield TensorDiff(name, Kind.BUFFER, f"lost: in {a.origin}, not in {b.origin}", one)
        elif _key(one) != _key(other):
            what = "all zero" if other.is_zero else f"l2 {one.l2:.6g} -> {other.l2:.6g}"
            yield TensorDiff(name, Kind.BUFFER, f"changed: {what}", one, other)
    for name in b.buffers.keys() - a.buffers.keys():
        yield TensorDiff(name, Kind.BUFFER, f"in {b.origin}, not in {a.origin}", None, b.buffers[name])
