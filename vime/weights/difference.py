"""What differs between two dumps of weights, and why: plain data, with its words."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from vime.weights.manifest import layer_of
from vime.weights.manifest_file import Dump, TensorRecord
from vime.weights.values import Gap


class Kind(StrEnum):
    """Why a tensor of ``b`` is not that of ``a``, the most telling first: the order in which findings are shown."""

    MISSING = "missing"
    EXTRA = "extra"
    RENAMED = "renamed"
    PADDED = "padded vocabulary"
    TRANSPOSED = "transposed"
    SHAPE = "shape"
    DTYPE = "dtype"
    NONFINITE = "not finite"
    ZERO = "all zero"
    CONSTANT = "constant"
    LAYERS = "permuted layers"
    EXPERTS = "wrong experts"
    SWAPPED = "swapped"
    ROWS = "permuted rows"
    ELEMENTS = "permuted elements"
    ROUNDED = "rounded to bfloat16"
    TIED = "tied embeddings"
    VALUE = "value"
    BUFFER = "buffer"
    UNTESTED = "not tested"
    EQUAL = "equal"


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One tensor of both. ``gap``: None where the tensors were not at hand; ``partner``: the tensor of ``a`` that ``b``
    holds under this name.
    """

    name: str
    kind: Kind
    detail: str = ""
    a: TensorRecord | None = None
    b: TensorRecord | None = None
    partner: str = ""
    gap: Gap | None = None

    def as_dict(self) -> dict[str, Any]:
        sides = {side: _brief(record) for side, record in (("a", self.a), ("b", self.b))}
        numbers = {"max_abs": None, "relative_l2": None, "cosine": None} if self.gap is None else asdict(self.gap)
        layer = layer_of(self.name)[1]
        about = {"name": self.name, "layer": layer, "kind": str(self.kind), "detail": self.detail}
        return {**about, "partner": self.partner, **numbers, **sides}


@dataclass(frozen=True, slots=True)
class Finding:
    """Differences that have one cause. where: the layer, the group, or the tensor that is concerned."""

    kind: Kind
    where: str
    detail: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.detail}"


@dataclass(frozen=True)
class WeightDiff:
    """What ``b`` has wrong, taking ``a`` as right. tensors: all of them, in a's order; buffers: those that differ."""

    a: Dump
    b: Dump
    tensors: tuple[TensorDiff, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    buffers: tuple[TensorDiff, ...] = field(default=())

    @property
    def num_equal(self) -> int:
        return sum(t.kind == Kind.EQUAL for t in self.tensors)

    @property
    def num_untested(self) -> int:
        """Tensors that one side could not read back: neither equal nor different."""
        return sum(t.kind == Kind.UNTESTED for t in self.tensors)

    @property
    def is_equal(self) -> bool:
        """Of what was tested."""
        return not self.findings

    @property
    def summary(self) -> str:
        """One line."""
        untested = f", {self.num_untested} NOT TESTED" if self.num_untested else ""
        equal = f"{self.num_equal}/{len(self.tensors)} tensors bitwise equal{untested}"
        if self.is_equal:
            return f"{self.b.origin} = {self.a.origin}: {equal}"
        kinds = Counter(str(f.kind) for f in self.findings)
        listed = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        return f"{self.b.origin} against {self.a.origin}: {equal}; {listed}"

    def worst(self, limit: int) -> list[tuple[TensorDiff, Gap]]:
        """The tensors furthest apart, where both sides had their tensors at hand, and no tensor or row is misplaced."""
        found = [(t, t.gap) for t in self.tensors if t.gap is not None and t.kind not in (Kind.SWAPPED, Kind.ROWS)]
        return sorted(found, key=lambda each: -each[1].relative_l2)[:limit]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for ``--json`` and the page."""
        return {
            "a": _about(self.a),
            "b": _about(self.b),
            "is_equal": self.is_equal,
            "summary": self.summary,
            "num_tensors": len(self.tensors),
            "num_equal": self.num_equal,
            "findings": [
                {"kind": str(f.kind), "where": f.where, "detail": f.detail, "tensors": list(f.tensors)}
                for f in self.findings
            ],
            "notes": list(self.notes),
            "tensors": [t.as_dict() for t in self.tensors],
            "buffers": [t.as_dict() for t in self.buffers],
        }


def _about(dump: Dump) -> dict[str, Any]:
    names = ("version", "origin", "family", "layout", "model", "is_tied", "vocab_size", "selection")
    return {name: getattr(dump, name) for name in names} | {"num_tensors": len(dump.tensors)}


def _brief(record: TensorRecord | None) -> dict[str, Any] | None:
    if record is None:
        return None
    names = ("dtype", "l2", "minimum", "maximum", "mean", "num_nonfinite", "how")
    return {name: getattr(record, name) for name in names} | {
        "shape": list(record.shape),
        "digest": record.digest[:16],
    }
