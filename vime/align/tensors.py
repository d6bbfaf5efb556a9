"""How far two tensors are apart, in float64 sums over pieces of bounded size."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

PIECE = 1 << 22  # elements held in float64 at a time


@dataclass(frozen=True, slots=True)
class TensorGap:
    """Reference against candidate. ``change``: norm of (reference - its value before the step), 0.0 where not asked.

    ``problem``: why the two cannot be subtracted at all; they are infinitely far then.
    """

    name: str
    norm: float
    distance: float
    dot: float
    other_norm: float
    max_abs: float
    change: float = 0.0
    problem: str = ""

    @classmethod
    def incomparable(cls, name: str, problem: str) -> TensorGap:
        """Of a tensor that one of the two does not have, or has in another shape."""
        return cls(name, 0.0, math.inf, 0.0, 0.0, math.inf, problem=problem)

    @property
    def relative_l2(self) -> float:
        return ratio(self.distance, self.norm)

    @property
    def cosine(self) -> float:
        """1.0 where both are 0; 0.0 where one of them is, or has an element that is not finite."""
        if not self.norm and not self.other_norm:
            return 1.0
        scale = self.norm * self.other_norm
        return self.dot / scale if scale and math.isfinite(scale) and math.isfinite(self.dot) else 0.0


def ratio(part: float, whole: float) -> float:
    """part / whole; 0 / 0 is 0, anything else over 0 infinite, and so is what is not finite: never nan."""
    if not part:
        return 0.0
    return part / whole if whole and math.isfinite(part) and math.isfinite(whole) else math.inf


def tensor_gap(name: str, reference: np.ndarray, candidate: np.ndarray, before: np.ndarray | None = None) -> TensorGap:
    """Compare two arrays of one shape; ``before`` is the reference's value before the step. ValueError if they differ
    in shape; a non-finite element counts as infinitely far.
    """
    if reference.shape != candidate.shape:
        raise ValueError(f"{name}: {list(reference.shape)} against {list(candidate.shape)}")
    norm = other = dot = far = change = max_abs = 0.0
    flat, flat_other = reference.reshape(-1), candidate.reshape(-1)
    flat_before = None if before is None else before.reshape(-1)
    for at in range(0, len(flat), PIECE):
        a, b = flat[at : at + PIECE].astype(np.float64), flat_other[at : at + PIECE].astype(np.float64)
        with np.errstate(invalid="ignore"):  # inf - inf, which is not used
            gap = np.where(np.isfinite(a) & np.isfinite(b), np.abs(b - a), np.where(a == b, 0.0, np.inf))
        norm, other, dot = norm + float(a @ a), other + float(b @ b), dot + float(a @ b)
        far, max_abs = far + float(gap @ gap), max(max_abs, float(gap.max()))
        if flat_before is not None:
            moved = a - flat_before[at : at + PIECE].astype(np.float64)
            change += float(moved @ moved)
    norm, far, other, change = (math.sqrt(total) for total in (norm, far, other, change))
    return TensorGap(name, norm, far, dot, other, max_abs, change)


def exchanged_shards(reference: np.ndarray, candidate: np.ndarray, num_shards: int) -> int | None:
    """The dimension along which the candidate holds the reference's ``num_shards`` shards in another order, or None."""
    for dim in range(reference.ndim):
        if num_shards < 2 or reference.shape[dim] % num_shards:
            continue
        ours = [part.tobytes() for part in np.split(reference, num_shards, dim)]
        theirs = [part.tobytes() for part in np.split(candidate, num_shards, dim)]
        if ours != theirs and sorted(ours) == sorted(theirs):
            return dim
    return None
