"""The HTML page of the differences of two dumps of weights: findings, layers x tensors at a glance, every tensor."""

from __future__ import annotations

from typing import Any

from vime.record.export import finite
from vime.report.page import page
from vime.weights.difference import Kind, WeightDiff
from vime.weights.grouping import EXPERT
from vime.weights.manifest import layer_of

SYMBOLS: dict[Kind, tuple[str, str]] = {
    Kind.MISSING: ("∅", "missing"),
    Kind.EXTRA: ("+", "missing"),
    Kind.RENAMED: ("≈", "form"),
    Kind.PADDED: ("P", "form"),
    Kind.TRANSPOSED: ("T", "permuted"),
    Kind.SHAPE: ("□", "form"),
    Kind.DTYPE: ("d", "form"),
    Kind.NONFINITE: ("!", "value"),
    Kind.ZERO: ("0", "value"),
    Kind.CONSTANT: ("c", "value"),
    Kind.LAYERS: ("→", "permuted"),
    Kind.EXPERTS: ("⇄", "permuted"),
    Kind.SWAPPED: ("⇄", "permuted"),
    Kind.ROWS: ("⇅", "permuted"),
    Kind.ELEMENTS: ("↻", "permuted"),
    Kind.ROUNDED: ("b", "value"),
    Kind.TIED: ("=", "value"),
    Kind.VALUE: ("≠", "value"),
    Kind.BUFFER: ("≠", "value"),
    Kind.UNTESTED: ("?", "form"),
    Kind.EQUAL: ("✓", "equal"),
}
"""Of each kind of difference, the sign in the grid and the group that gives the colour."""
ABOUT = ("origin", "version", "model", "family", "layout", "num_tensors", "selection")


def weights_page(diff: WeightDiff) -> str:
    """The page, one file; works without the tensors, with the numbers that the two manifests have."""
    found = diff.as_dict()
    rows = [*found["tensors"], *found["buffers"]]
    title = f"weights: {diff.b.origin} against {diff.a.origin}"
    data = {
        "title": title,
        "is_equal": found["is_equal"],
        "summary": found["summary"],
        "sides": [[name, _text(found["a"][name]), _text(found["b"][name])] for name in ABOUT],
        "findings": found["findings"],
        "notes": found["notes"],
        "kinds": _kinds(rows, found["findings"]),
        "tensors": [_tensor(row) for row in rows],
        "num_tensors": len(found["tensors"]),
    }
    return page(title, "weights", finite(data), ("base", "plots"))


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _kinds(rows: list[dict[str, Any]], findings: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The kinds that occur, the most telling first."""
    present = {row["kind"] for row in (*rows, *findings)}
    known = ((str(kind), *SYMBOLS[kind]) for kind in Kind if str(kind) in present)
    return [{"name": name, "symbol": symbol, "group": group} for name, symbol, group in known]


def _tensor(row: dict[str, Any]) -> dict[str, Any]:
    """``column``: the name without the number of its layer and of its expert; of equal tensors no numbers."""
    a, b = row["a"], row["b"]
    one = a or b
    known = {
        "name": row["name"],
        "layer": row["layer"],
        "column": EXPERT.sub("*", layer_of(row["name"])[0]).split("*.", 1)[-1].removesuffix(".weight"),
        "kind": row["kind"],
        "shape": " x ".join(map(str, one["shape"])) if one else "",
        "dtype": one["dtype"] if one else "",
    }
    if row["kind"] == str(Kind.EQUAL):
        return known
    numbers = {name: row[name] for name in ("max_abs", "relative_l2", "cosine")}
    partner_layer = layer_of(row["partner"])[1] if row["partner"] else None
    l2 = {"l2_a": a["l2"] if a else None, "l2_b": b["l2"] if b else None}
    return {**known, "detail": row["detail"], "partner_layer": partner_layer, **numbers, **l2}
