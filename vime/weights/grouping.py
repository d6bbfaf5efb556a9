"""Tensors that differ for one cause: layers, experts and rows at the wrong place, found among the single tensors."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace

from vime.weights.difference import Finding, Kind, TensorDiff
from vime.weights.manifest import layer_of
from vime.weights.manifest_file import Dump
from vime.weights.rows import explain, fused_groups, joined

EXPERT = re.compile(r"(?<=\.experts\.)(\d+)(?=\.)")
SHOWN = 5


def group_partners(rows: Mapping[str, TensorDiff]) -> list[Finding]:
    """Of the tensors that hold another tensor of ``a``: whole layers, experts, pairs."""
    layers: dict[tuple[int, int], list[str]] = defaultdict(list)
    experts: dict[tuple[str, int, int], list[str]] = defaultdict(list)
    pairs: dict[str, str] = {}
    for row in rows.values():
        if row.kind != Kind.SWAPPED:
            continue
        (kind, layer), (other_kind, other) = layer_of(row.name), layer_of(row.partner)
        if EXPERT.search(row.name) and EXPERT.sub("*", row.name) == EXPERT.sub("*", row.partner):
            experts[_place(row.name), _expert(row.name), _expert(row.partner)].append(row.name)
        elif kind == other_kind and layer is not None and other is not None and layer != other:
            layers[layer, other].append(row.name)
        else:
            pairs[row.name] = row.partner
    telling = Counter(layer_of(n)[1] for n, row in rows.items() if row.a is not None and not row.a.is_constant)
    alone = {pair: names for pair, names in layers.items() if len(names) == 1 and telling[pair[0]] > 1}
    for pair, (name,) in alone.items():
        pairs[name] = rows[name].partner
        del layers[pair]
    return [*_layers(rows, layers, telling), *_experts(experts, rows), *_pairs(pairs)]


def _expert(name: str) -> int:
    found = EXPERT.search(name)
    assert found is not None
    return int(found[1])


def _layers(
    rows: Mapping[str, TensorDiff], layers: Mapping[tuple[int, int], list[str]], telling: Mapping[int | None, int]
) -> list[Finding]:
    """``telling``: tensors of each layer that would differ if it were another; the ones of a norm are alike."""
    totals = Counter(layer_of(name)[1] for name in rows)
    is_whole = all(len(names) == telling[layer] for (layer, _), names in layers.items())
    num_layers = max((layer for layer in totals if layer is not None), default=-1) + 1
    is_local = is_whole and _counts_from_0(dict([*layers]), num_layers)
    hint = ": the stage offset is missing" if is_local else ""
    found = []
    for (layer, other), names in sorted(layers.items()):
        swap = " and the other way round" if (other, layer) in layers else hint
        text = f"layer {layer} holds layer {other}'s tensors{swap} ({len(names)} of {totals[layer]})"
        found.append(Finding(Kind.LAYERS, f"layer {layer}", text, tuple(names)))
    return found


def _counts_from_0(moved: Mapping[int, int], total: int) -> int:
    """How many each rank has, if ranks of equal size hold, under the numbers of ``moved``, 0, 1, ... again; else 0.

    One number alone that holds 0 says nothing of ranks, unless all after the first do.
    """
    size = max(moved.values(), default=-1) + 1
    is_local = size > 0 and min(moved) >= size and all(number % size == other for number, other in moved.items())
    is_whole = all(Counter(number // size for number in moved)[rank] == size for rank in {n // size for n in moved})
    is_telling = size > 1 or len(moved) == total - 1
    return size if is_local and is_whole and is_telling and total % size == 0 else 0


def _experts(experts: dict[tuple[str, int, int], list[str]], rows: Mapping[str, TensorDiff]) -> list[Finding]:
    by_place: dict[str, dict[int, int]] = defaultdict(dict)
    names: dict[str, list[str]] = defaultdict(list)
    for (place, expert, other), found in experts.items():
        by_place[place][expert] = other
        names[place] += found
    present: dict[str, list[int]] = defaultdict(list)
    for name in rows:
        if EXPERT.search(name):
            present[_place(name)].append(_expert(name))
    return [
        Finding(Kind.EXPERTS, place, _expert_text(moved, names[place], present[place]), tuple(names[place]))
        for place, moved in by_place.items()
    ]


def _place(name: str) -> str:
    return name.split(".experts.")[0]


def _expert_text(moved: Mapping[int, int], names: list[str], present: list[int]) -> str:
    """``present``: the expert of every tensor there."""
    num_experts = 1 + max(present)
    is_whole = len(names) * num_experts == len(moved) * len(present)
    if is_whole and (size := _counts_from_0(moved, num_experts)):
        first, last = min(moved), max(moved)
        ranks = sorted({expert // size for expert in moved})
        who = f"rank {ranks[0]} of EP counts" if len(ranks) == 1 else f"ranks {ranks[0]}..{ranks[-1]} of EP count"
        its = "its" if len(ranks) == 1 else "their"
        return f"experts {first}..{last} hold 0..{size - 1} again: {who} {its} experts from 0, the offset is missing"
    listed = ", ".join(f"{expert} holds {other}" for expert, other in sorted(moved.items())[:SHOWN])
    of = "" if is_whole else f" ({len(names)} of their tensors)"
    return f"experts in another order: {listed}{of}"


def _pairs(pairs: dict[str, str]) -> list[Finding]:
    found = []
    for name, partner in pairs.items():
        if pairs.get(partner) == name:
            if name < partner:
                found.append(Finding(Kind.SWAPPED, name, f"and {partner} are swapped", (name, partner)))
        else:
            found.append(Finding(Kind.SWAPPED, name, f"holds {partner}", (name,)))
    return found


def group_rows(a: Dump, b: Dump, rows: dict[str, TensorDiff]) -> list[Finding]:
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
