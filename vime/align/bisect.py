"""Where two implementations of one model part: outputs compared at points of one name, by binary search over layers.

Each comparison is one forward on either side, so few points are asked for at a time. Axes: L tokens, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from vime.align.points import (
    EMBED,
    FINAL_NORM,
    LOG_PROB,
    all_points,
    layer_of,
    operation,
    order,
    part_of,
    point,
    weights_of,
)
from vime.types import WeightManifest

NATS = 2.0
"""Of ``log_prob``, for one of relative error."""


def tolerance_of(dtype: str, num_layers: int) -> float:
    """The largest relative error of rounding, with room: what is above it is a difference.

    Measured with transformers on random models of 4, 30 and 60 layers, worst point and token: float32 against float64
    3e-6, 1e-5, 3e-5 (``log_prob`` 3e-5 nats); bfloat16 against float32 0.06, 0.26, 0.52 (0.1 to 0.7 nats), which
    leaves gross errors to be seen alone.
    """
    return 0.1 + 0.015 * num_layers if dtype == "bfloat16" else 1e-4


CAUSES = {
    "attn_out": "the rotary cache, the attention kernel or its mask differ",
    "mlp_out": "the MLP kernel differs, or its tokens went to other experts",
    "router": "the router adds a bias that is no weight of the checkpoint, or computes in another dtype",
    LOG_PROB: "the head computes in another dtype, or the padded vocabulary is in the softmax",
    EMBED: "the token ids are read differently",
}
"""By part, where the weights are the same on both sides."""
OTHERWISE = "the export gives them a wrong name or order of rows, or the computation itself differs (kernel, dtype)"
NEXT_STEPS = {
    "attn_out": "vime align-check RUN.toml --only buffers; then megatron.transformer.attention_backend = flash",
    "mlp_out": "vime align-check RUN.toml --only routing, for a model with experts",
    "router": "megatron.transformer.moe_router_dtype = fp32",
    LOG_PROB: "vime align-check RUN.toml --only head",
}
BYTES_AT_ONCE = 64 << 20
"""Of outputs in one answer of one side."""

Outputs = Callable[[np.ndarray, Sequence[str]], Mapping[str, np.ndarray]]


@dataclass(frozen=True, slots=True)
class Side:
    """One implementation. ``manifest``: digests of its weights under Hugging Face names."""

    name: str
    outputs: Outputs
    manifest: Callable[[], WeightManifest]


@dataclass(frozen=True, slots=True)
class Difference:
    """One point. error: of the worst token, |one - other| relative to |other| (L2 over the width); for ``log_prob``
    in nats; inf where a value is not finite on one side only, or the widths differ.

    token   index of the worst token;  num_tokens   tokens above the tolerance
    """

    point: str
    error: float
    token: int = 0
    num_tokens: int = 0

    def is_above(self, tolerance: float) -> bool:
        return self.error > limit_of(self.point, tolerance)


def limit_of(name: str, tolerance: float) -> float:
    """The tolerance of one point, in its unit."""
    return NATS * tolerance if name == LOG_PROB else tolerance


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of the operation in doubt; ``is_equal`` None: one side does not tell."""

    name: str
    is_equal: bool | None


@dataclass(frozen=True, slots=True)
class Bisection:
    """What was found.

    first        the first point above the tolerance, None where there is none
    before       the point before it, the last that agrees
    largest      the largest error met
    layers       error of the residual stream after each layer, then of ``final_norm`` and ``log_prob``
    inside       the points of the layer of ``first``
    missing      points that only one side can give
    num_forwards forwards of one side
    """

    sides: tuple[str, str]
    tolerance: float
    first: Difference | None
    before: Difference | None
    largest: Difference
    layers: tuple[Difference, ...]
    inside: tuple[Difference, ...]
    weights: tuple[Weight, ...] = ()
    missing: tuple[str, ...] = ()
    num_forwards: int = 0

    @property
    def sentence(self) -> str:
        """The finding in one line."""
        one, other = self.sides
        if self.first is None:
            return (
                f"{one} against {other}: no point above tolerance {self.tolerance:.2g}, largest "
                f"{self.largest.error:.2g} at {self.largest.point}"
            )
        error = f"{self.first.error:.2g}" if np.isfinite(self.first.error) else "not finite"
        return (
            f"{one} against {other}: first above tolerance {self.tolerance:.2g}: {self.first.point} "
            f"({operation(self.first.point)}), error {error} at token {self.first.token}"
        )

    @property
    def cause(self) -> str:
        """What the finding points to; empty where nothing was found."""
        if self.first is None:
            return ""
        unequal = [weight.name for weight in self.weights if weight.is_equal is False]
        if unequal:
            return f"the sides hold different weights: {', '.join(unequal[:4])}"
        untold = [weight.name for weight in self.weights if weight.is_equal is None]
        if untold:
            return f"the computation, or weights that could not be compared: {', '.join(untold[:4])}"
        part, equal = part_of(self.first.point), "the weights have equal digests: " if self.weights else ""
        return equal + CAUSES.get(part, OTHERWISE if self.weights else "the computation itself differs")

    @property
    def next_step(self) -> str:
        if self.first is None:
            return ""
        if any(weight.is_equal is False for weight in self.weights):
            return "vime align-check RUN.toml --only weights,names tells how the tensors differ and which side is wrong"
        return NEXT_STEPS.get(
            part_of(self.first.point), "compare both sides with --against hf: it tells which is wrong"
        )

    def numbers(self) -> dict[str, Any]:
        """Plain data, for JSON and plots."""
        rows = lambda found: [[d.point, _plain(d.error), d.token, d.num_tokens] for d in found]  # noqa: E731
        return {
            "sides": list(self.sides),
            "tolerance": self.tolerance,
            "first": None if self.first is None else self.first.point,
            "operation": None if self.first is None else operation(self.first.point),
            "before": None if self.before is None else self.before.point,
            "largest": [self.largest.point, _plain(self.largest.error)],
            "layers": rows(self.layers),
            "inside": rows(self.inside),
            "weights": [[w.name, w.is_equal] for w in self.weights],
            "missing": list(self.missing),
            "num_forwards": self.num_forwards,
        }


def _plain(error: float) -> float | str:
    return error if np.isfinite(error) else "inf"


def differences(
    one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], tolerance: float
) -> dict[str, Difference]:
    """Of every point that both sides have, in the order of computation."""
    shared = sorted(one.keys() & other.keys(), key=order)
    return {name: _difference(name, one[name], other[name], tolerance) for name in shared}


def _difference(name: str, one_LW: np.ndarray, other_LW: np.ndarray, tolerance: float) -> Difference:
    if one_LW.shape != other_LW.shape:
        return Difference(name, float("inf"), 0, len(other_LW))
    with np.errstate(all="ignore"):
        a_LW, b_LW = one_LW.astype(np.float64), other_LW.astype(np.float64)
        gap_L = np.linalg.norm(a_LW - b_LW, axis=1)
        scale_L = np.linalg.norm(b_LW, axis=1)
        error_L = gap_L if name == LOG_PROB else np.divide(gap_L, scale_L, out=gap_L.copy(), where=scale_L > 0)
    is_same_L = ((one_LW == other_LW) | (np.isnan(one_LW) & np.isnan(other_LW))).all(1)
    error_L = np.where(is_same_L, 0.0, np.where(np.isfinite(error_L), error_L, np.inf))
    worst = int(error_L.argmax())
    return Difference(name, float(error_L[worst]), worst, int((error_L > limit_of(name, tolerance)).sum()))


class Search:
    """Asks both sides, and remembers every point that was compared."""

    def __init__(self, one: Side, other: Side, token_ids: np.ndarray, num_layers: int, tolerance: float) -> None:
        self.one, self.other = one, other
        self.token_ids, self.num_layers, self.tolerance = token_ids, num_layers, tolerance
        self.found: dict[str, Difference] = {}
        self.missing: dict[str, None] = {}
        self.num_forwards = 0
        self._widest = 1

    def compare(self, points: Sequence[str]) -> list[Difference]:
        """In the order given, of those points that both sides have."""
        for some in self._portions([name for name in points if name not in self.found and name not in self.missing]):
            one, other = (dict(side.outputs(self.token_ids, some)) for side in (self.one, self.other))
            self.num_forwards += 1
            self.found |= differences(one, other, self.tolerance)
            self.missing |= dict.fromkeys(name for name in some if (name in one) != (name in other))
            self._widest = max([self._widest, *(value.shape[1] for value in one.values())])
        return [self.found[name] for name in points if name in self.found]

    def _portions(self, points: Sequence[str]) -> Iterator[Sequence[str]]:
        """Few enough that an answer stays within ``BYTES_AT_ONCE``, by the widest output so far."""
        at = 0
        while at < len(points):
            count = max(1, BYTES_AT_ONCE // (4 * len(self.token_ids) * self._widest))
            yield points[at : at + count]
            at += count

    def is_above(self, name: str) -> bool:
        return any(difference.is_above(self.tolerance) for difference in self.compare([name]))

    def first_layer(self) -> int | None:
        """The first layer whose residual stream is above the tolerance, given that the last one's is."""
        if not self.is_above(point(self.num_layers - 1, "out")):
            return None
        below, above = -1, self.num_layers - 1
        while above - below > 1:
            middle = (below + above) // 2
            below, above = (below, middle) if self.is_above(point(middle, "out")) else (middle, above)
        return above

    def first(self, points: Sequence[str]) -> Difference | None:
        return next((d for d in self.compare(points) if d.is_above(self.tolerance)), None)


def bisect(
    one: Side, other: Side, token_ids: np.ndarray, num_layers: int, has_experts: bool, tolerance: float
) -> Bisection:
    """The first point of ``one`` that is further from ``other`` than ``tolerance``.

    A difference that dies out before the last layer is still found: where the end agrees every point is compared.
    """
    search = Search(one, other, token_ids, num_layers, tolerance)
    points = all_points(num_layers, has_experts)
    search.compare([EMBED, point(num_layers - 1, "out"), FINAL_NORM, LOG_PROB])
    first = search.first([EMBED])
    layer = None if first is not None else search.first_layer()
    if layer is not None:
        first = search.first([name for name in points if layer_of(name) == layer])
    elif first is None:
        first = search.first(points)
    layers = search.compare([point(layer, "out") for layer in range(num_layers)] + [FINAL_NORM, LOG_PROB])
    return _told(search, first, layers, points)


def _told(search: Search, first: Difference | None, layers: list[Difference], points: Sequence[str]) -> Bisection:
    compared = [search.found[name] for name in points if name in search.found]
    inside: list[Difference] = []
    before: Difference | None = None
    weights: tuple[Weight, ...] = ()
    if first is not None:
        layer = layer_of(first.point)
        inside = [d for d in compared if layer is not None and layer_of(d.point) == layer]
        earlier = [d for d in compared if order(d.point) < order(first.point)]
        before = earlier[-1] if earlier else None
        unseen = [p for p in search.missing if layer_of(p) == layer and order(p) < order(first.point)]
        weights = _weights(search.one, search.other, unseen, first.point)
    return Bisection(
        (search.one.name, search.other.name),
        search.tolerance,
        first,
        before,
        max(compared, key=lambda d: d.error),
        tuple(layers),
        tuple(inside),
        weights,
        tuple(sorted(search.missing, key=order)),
        search.num_forwards,
    )


def _weights(one: Side, other: Side, missing: Sequence[str], first: str) -> tuple[Weight, ...]:
    """Of the point, and of the points before it in its layer that one side could not give. Equal: digest and dtype."""
    mine, theirs = one.manifest().tensors, other.manifest().tensors
    names = [name for point in (*missing, first) for name in weights_of(point, {**mine, **theirs})]
    found = []
    for name in names:
        a, b = mine.get(name), theirs.get(name)
        is_told = a is not None and b is not None and a.digest and b.digest
        found.append(Weight(name, (a.dtype, a.digest) == (b.dtype, b.digest) if is_told and a and b else None))
    return tuple(found)


def worst_sample(gap_T: np.ndarray, offsets: np.ndarray) -> int:
    """The sample with the largest |difference| of any token; the first one where none differs."""
    largest_N = [float(np.nan_to_num(gap_T[a:b], nan=np.inf).max(initial=0.0)) for a, b in pairwise(offsets)]
    return int(np.argmax(largest_N))
