"""Two dumps of weights compared tensor by tensor, and what the differences come from. Works on manifests alone."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vime.errors import UsageError
from vime.weights.difference import Finding, Kind, TensorDiff, WeightDiff
from vime.weights.manifest import layer_of
from vime.weights.manifest_file import EMBEDDING, LM_HEAD, Dump, TensorRecord
from vime.weights.rows import differing_shard, explain, fused_groups, joined
from vime.weights.values import Gap, gap

if TYPE_CHECKING:
    import torch

Read = Callable[[str], "torch.Tensor"]
EXPERT = re.compile(r"(?<=\.experts\.)(\d+)(?=\.)")
SAME = 1e-9  # relative; l2 and mean of the same elements in another order
SHOWN = 5


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
    findings = [*_group_partners(a, b, rows), *_group_rows(a, b, rows), *_untied(a, b)]
    explained = {name for found in findings for name in found.tensors}
    findings += [_single(row) for row in rows.values() if row.kind != Kind.EQUAL and row.name not in explained]
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
    owners = _owners(a)
    for name, one in a.tensors.items():
        other = b.tensors.get(name)
        if other is not None:
            yield _compared(name, one, other, owners, reader)
        elif name in renamed:
            yield TensorDiff(name, Kind.RENAMED, f"is called {renamed[name]} in {b.origin}", one, None, renamed[name])
        elif not is_partial and not _is_tied_head(a, b, name):
            yield TensorDiff(name, Kind.MISSING, f"in {a.origin}, not in {b.origin}", one)
    for name, other in b.tensors.items():
        if name not in a.tensors and name not in renamed.values() and not is_partial and not _is_tied_head(b, a, name):
            yield TensorDiff(name, Kind.EXTRA, f"in {b.origin}, not in {a.origin}", None, other)


def _renamed(a: Dump, b: Dump) -> dict[str, str]:
    """Names of ``a`` that ``b`` lacks -> names of ``b`` that ``a`` lacks, with the same bytes, both the only ones."""
    extra: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, record in b.tensors.items():
        if name not in a.tensors:
            extra[_key(record)].append(name)
    lost: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, record in a.tensors.items():
        if name not in b.tensors:
            lost[_key(record)].append(name)
    return {names[0]: extra[key][0] for key, names in lost.items() if len(names) == len(extra.get(key, [])) == 1}


def _key(record: TensorRecord) -> tuple[Any, ...]:
    return record.shape, record.dtype, record.digest


def _owners(a: Dump) -> dict[tuple[Any, ...], list[str]]:
    owners: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, record in a.tensors.items():
        if not record.is_constant:  # norms that are all ones are alike everywhere
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
    if one.shape == other.shape[::-1] and len(one.shape) == 2:
        proven = " (element by element)" if reader.is_transposed(row.name) else ""
        return replace(row, kind=Kind.TRANSPOSED, detail=f"{shapes}{proven}")
    if row.name in (LM_HEAD, EMBEDDING) and one.shape[1:] == other.shape[1:] and other.shape[0] > one.shape[0]:
        extra = other.shape[0] - one.shape[0]
        return replace(row, kind=Kind.PADDED, detail=f"{shapes}: {extra} rows of padding were not cut off")
    return replace(row, kind=Kind.SHAPE, detail=shapes)


def _drift(one: TensorRecord, other: TensorRecord) -> str:
    text = f"{one.dtype} -> {other.dtype}"
    near = abs(one.l2 - other.l2) <= 1e-2 * max(one.l2, other.l2)
    return f"{text}, values close" if near else f"{text}, l2 {one.l2:.6g} -> {other.l2:.6g}"


def _other_values(row: TensorDiff, one: TensorRecord, other: TensorRecord, reader: _Reader) -> TensorDiff:
    if other.is_bf16 and not one.is_bf16 and abs(one.l2 - other.l2) <= 1e-2 * one.l2:
        return replace(row, kind=Kind.ROUNDED, detail="every element is what bfloat16 can hold: it went through it")
    if _same_elements(one, other):
        return replace(row, kind=Kind.ELEMENTS, detail=_moved(row.name, one, other, reader))
    where = differing_shard(one, other)
    size = f"l2 {one.l2:.6g} -> {other.l2:.6g}" if row.gap is None else _gap_text(row.gap)
    return replace(row, kind=Kind.VALUE, detail=f"{where}; {size}" if where else size)


def _gap_text(found: Gap) -> str:
    return f"max |difference| {found.max_abs:.3g}, relative L2 {found.relative_l2:.3g}, cosine {found.cosine:.6f}"


def _same_elements(one: TensorRecord, other: TensorRecord) -> bool:
    if (one.minimum, one.maximum, one.num_nonfinite) != (other.minimum, other.maximum, other.num_nonfinite):
        return False
    scale = max(abs(one.minimum), abs(one.maximum))
    return abs(one.l2 - other.l2) <= SAME * one.l2 and abs(one.mean - other.mean) <= SAME * scale


def _moved(name: str, one: TensorRecord, other: TensorRecord, reader: _Reader) -> str:
    if reader.is_transposed(name):
        return "transposed (square)"
    if one.rows and Counter(one.rows) == Counter(other.rows):
        return "the same rows in another order"
    if tp := reader.moved_columns(name):
        return f"columns: shards of tp = {tp} in another order of ranks"
    likely = "transposed, or " if len(one.shape) == 2 and one.shape[0] == one.shape[1] else ""
    return f"the same elements at other places (same extremes, mean and norm): {likely}columns or rows in another order"


# ---------------------------------------------------------------- one cause for many


def _group_partners(a: Dump, b: Dump, rows: dict[str, TensorDiff]) -> list[Finding]:
    """Of the tensors that hold another tensor of ``a``: whole layers, experts, pairs."""
    layers: dict[tuple[int, int], list[str]] = defaultdict(list)
    experts: dict[tuple[str, int, int], list[str]] = defaultdict(list)
    pairs: dict[str, str] = {}
    for row in rows.values():
        if row.kind != Kind.SWAPPED:
            continue
        (kind, layer), (other_kind, other) = layer_of(row.name), layer_of(row.partner)
        if EXPERT.search(row.name) and EXPERT.sub("*", row.name) == EXPERT.sub("*", row.partner):
            place = EXPERT.sub("*", row.name).split(".experts.")[0]
            experts[place, _expert(row.name), _expert(row.partner)].append(row.name)
        elif kind == other_kind and layer is not None and other is not None and layer != other:
            layers[layer, other].append(row.name)
        else:
            pairs[row.name] = row.partner
    return [*_layers(b, rows, layers), *_experts(experts), *_pairs(pairs)]


def _expert(name: str) -> int:
    found = EXPERT.search(name)
    assert found is not None
    return int(found[1])


def _layers(b: Dump, rows: dict[str, TensorDiff], layers: dict[tuple[int, int], list[str]]) -> list[Finding]:
    found = []
    offsets = {layer - other for layer, other in layers}
    is_local = len(offsets) == 1 and next(iter(offsets)) > 0
    hint = ": the stage offset is missing" if is_local else ""
    for (layer, other), names in sorted(layers.items()):
        num = sum(layer_of(n)[1] == layer for n in b.tensors)
        swap = " and the other way round" if (other, layer) in layers else hint
        text = f"layer {layer} holds layer {other}'s tensors{swap} ({len(names)} of {num})"
        found.append(Finding(Kind.LAYERS, f"layer {layer}", text, tuple(names)))
    return found


def _experts(experts: dict[tuple[str, int, int], list[str]]) -> list[Finding]:
    by_place: dict[str, dict[int, int]] = defaultdict(dict)
    names: dict[str, list[str]] = defaultdict(list)
    for (place, expert, other), found in experts.items():
        by_place[place][expert] = other
        names[place] += found
    return [Finding(Kind.EXPERTS, place, _expert_text(moved), tuple(names[place])) for place, moved in by_place.items()]


def _expert_text(moved: dict[int, int]) -> str:
    offsets = {expert - other for expert, other in moved.items()}
    first, last = min(moved), max(moved)
    if len(offsets) == 1 and (offset := next(iter(offsets))) > 0:
        rank = first // offset
        again = f"experts {first}..{last} hold {first - offset}..{last - offset} again"
        return f"{again}: rank {rank} of EP counts its experts from 0, the offset {offset} is missing"
    listed = ", ".join(f"{expert} holds {other}" for expert, other in sorted(moved.items())[:SHOWN])
    return f"experts in another order: {listed}"


def _pairs(pairs: dict[str, str]) -> list[Finding]:
    found = []
    for name, partner in pairs.items():
        if pairs.get(partner) == name:
            if name < partner:
                found.append(Finding(Kind.SWAPPED, name, f"and {partner} are swapped", (name, partner)))
        else:
            found.append(Finding(Kind.SWAPPED, name, f"holds {partner}", (name,)))
    return found


def _group_rows(a: Dump, b: Dump, rows: dict[str, TensorDiff]) -> list[Finding]:
    """Fused matrices whose rows are all there, at other places."""
    found = []
    wrong = {name for name, row in rows.items() if row.kind in (Kind.VALUE, Kind.ELEMENTS)}
    fused = [names for names in fused_groups(a.tensors) if len(wrong.intersection(names)) > 1]
    explained: set[str] = set()
    for names in [*fused, *((name,) for name in sorted(wrong))]:
        moved = tuple(name for name in names if name in wrong and name not in explained)
        one, other = joined(a.tensors, names), joined(b.tensors, names)
        if not moved or one is None or other is None or not (text := explain(one, other)):
            continue
        explained.update(moved)
        where = moved[0] if len(moved) == 1 else f"{moved[0]} and {', '.join(n.split('.')[-2] for n in moved[1:])}"
        found.append(Finding(Kind.ROWS, where, text, moved))
        for name in moved:
            rows[name] = replace(rows[name], kind=Kind.ROWS, detail=text)
    return found


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
    probed = [name for name, record in b.tensors.items() if record.how == "probe"]
    if probed:
        yield f"{len(probed)} tensors of {b.origin} answered by a probe forward, first {probed[0]}"


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
