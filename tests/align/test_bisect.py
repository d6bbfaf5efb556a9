"""The search over two toy models of 12 layers whose outputs are known; one of them is changed at one point."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from vime.align import bisect as module
from vime.align.bisect import Difference, Side, bisect, differences, tolerance_of, worst_sample
from vime.align.points import all_points, layer_of, operation, part_of
from vime.types import TensorEntry, WeightManifest

LAYERS, TOKENS, WIDTH = 12, 5, 8
POINTS = all_points(LAYERS, False)
IDS = np.arange(TOKENS)


class Toy:
    """Outputs of every point, computed in order; ``damage`` changes one before everything after it is computed."""

    def __init__(self, damage: dict[str, Callable[[np.ndarray], np.ndarray]] | None = None, absent: str = "") -> None:
        self.damage, self.absent, self.asked = damage or {}, absent, []
        self.digests: dict[str, str] = {}

    def outputs(self, token_ids, points):
        self.asked.append(list(points))
        found = self._all()
        return {name: found[name] for name in points if part_of(name) != self.absent}

    def manifest(self) -> WeightManifest:
        names = [f"model.layers.{i}.self_attn.{part}.weight" for i in range(LAYERS) for part in ("q_proj", "o_proj")]
        names += [f"model.layers.{i}.mlp.up_proj.weight" for i in range(LAYERS)]
        entries = {n: TensorEntry(n, (2, 2), "float32", self.digests.get(n, "same")) for n in names}
        return WeightManifest(0, "toy", entries)

    def _all(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        found: dict[str, np.ndarray] = {}
        stream = rng.normal(size=(TOKENS, WIDTH))
        value = stream
        for name in POINTS:
            part = part_of(name)
            if part in ("attn_in", "mlp_in", "final_norm"):
                value = stream / np.linalg.norm(stream, axis=1, keepdims=True)
            elif part == "attn_out":
                value = np.cumsum(found[name.replace("attn_out", "q")] + found[name.replace("attn_out", "v")], 0)
            elif part in ("q", "k", "v"):
                value = found[name.replace(part, "attn_in")] @ rng.normal(size=(WIDTH, WIDTH))
            elif part == "mlp_out":
                value = value @ rng.normal(size=(WIDTH, WIDTH))
            elif part == "log_prob":
                value = value[:, :1]
            if part in ("attn_out", "mlp_out"):
                value = self.damage.get(name, lambda x: x)(value)
                stream = stream + value
            elif part == "out":
                value = stream = self.damage.get(name, lambda x: x)(stream)
            elif name in self.damage:
                value = self.damage[name](value)
            found[name] = value.astype(np.float32)
        return found


def found_in(one: Toy, other: Toy | None = None, tolerance: float = 1e-4):
    other = other or Toy()
    sides = Side("engine", one.outputs, one.manifest), Side("trainer", other.outputs, other.manifest)
    return bisect(*sides, IDS, LAYERS, False, tolerance)


def scaled(x: np.ndarray) -> np.ndarray:
    return x * 1.01


@pytest.mark.parametrize("name", [p for p in POINTS if layer_of(p) in (None, 0, 5, 11) and part_of(p) != "k"])
def test_the_first_damaged_point_is_found(name):
    one = Toy({name: scaled})
    result = found_in(one)
    assert result.first is not None
    assert result.first.point == name
    assert name == "embed" or result.before is not None
    assert f"{name} ({operation(name)})" in result.sentence


def test_a_point_that_no_later_one_shows_is_found_all_the_same():
    result = found_in(Toy({"layers.4.k": scaled}))  # the toy's attention does not look at keys
    assert result.first is not None
    assert result.first.point == "layers.4.k"


def test_few_forwards_and_few_points():
    one = Toy({"layers.7.mlp_out": scaled})
    result = found_in(one)
    assert result.num_forwards <= 1 + 4 + 1 + 1 + 1  # ends, binary search, layer, its stream, curve
    assert result.num_forwards == len(one.asked)
    asked = [name for some in one.asked for name in some]
    assert len(asked) == len(set(asked)), "no point twice"


def test_the_curve_shows_the_growth_after_it():
    result = found_in(Toy({"layers.7.out": scaled}))
    errors = {d.point: d.error for d in result.layers}
    assert list(errors) == [*(f"layers.{i}.out" for i in range(LAYERS)), "final_norm", "log_prob"]
    assert errors["layers.6.out"] == 0.0
    assert errors["layers.7.out"] == pytest.approx(0.01, rel=1e-3)
    assert result.before is not None
    assert result.before.point == "layers.7.mlp_out"
    assert [d.point for d in result.inside] == [p for p in POINTS if layer_of(p) == 7]


def test_a_nan_is_infinitely_far():
    def nan(x: np.ndarray) -> np.ndarray:
        return np.where(np.arange(TOKENS)[:, None] == 3, np.nan, x)

    result = found_in(Toy({"layers.2.q": nan}))
    assert result.first is not None
    assert (result.first.point, result.first.error, result.first.token) == ("layers.2.q", np.inf, 3)
    assert "not finite" in result.sentence
    assert result.numbers()["inside"][1] == ["layers.2.q", "inf", 3, 1]


def test_a_clean_pair():
    result = found_in(Toy())
    assert result.first is None
    assert result.sentence == "engine against trainer: no point above tolerance 0.0001, largest 0 at embed"
    assert result.cause == result.next_step == ""


def test_a_difference_below_the_tolerance_is_told_with_its_place():
    result = found_in(Toy({"layers.3.v": scaled}), tolerance=0.5)
    assert result.first is None
    assert result.largest.error > 0.005


def test_unequal_weights_are_the_cause():
    one = Toy({"layers.5.q": scaled})
    one.digests["model.layers.5.self_attn.q_proj.weight"] = "other"
    result = found_in(one)
    assert [(w.name, w.is_equal) for w in result.weights] == [("model.layers.5.self_attn.q_proj.weight", False)]
    assert result.cause == "the sides hold different weights: model.layers.5.self_attn.q_proj.weight"


def test_equal_weights_point_to_the_computation():
    result = found_in(Toy({"layers.0.attn_out": scaled}))
    assert result.weights[0].is_equal is True
    assert result.cause == "the weights have equal digests: the rotary cache, the attention kernel or its mask differ"
    assert "buffers" in result.next_step


def test_a_point_that_one_side_cannot_give_hands_its_weights_on():
    one = Toy({"layers.5.q": scaled}, absent="q")
    result = found_in(one)
    assert result.first is not None
    assert result.first.point == "layers.5.attn_out"
    assert result.missing == ("layers.5.q",)
    assert {w.name for w in result.weights} == {f"model.layers.5.self_attn.{p}.weight" for p in ("q_proj", "o_proj")}


def test_answers_stay_small(monkeypatch):
    monkeypatch.setattr(module, "BYTES_AT_ONCE", 4 * TOKENS * WIDTH * 3)
    one = Toy()
    found_in(one)
    assert max(len(some) for some in one.asked[1:]) == 3


def test_the_measure_by_hand():
    one = {"embed": np.array([[3.0, 4.0], [0.0, 0.0]]), "log_prob": np.array([[-1.0], [-2.5]])}
    other = {"embed": np.array([[3.0, 3.0], [0.0, 0.0]]), "log_prob": np.array([[-1.0], [-2.0]])}
    found = differences(one, other, 0.1)
    assert found["embed"].error == pytest.approx(1 / np.sqrt(18))
    assert (found["embed"].token, found["embed"].num_tokens) == (0, 1)
    assert found["log_prob"].error == 0.5, "nats"


def test_other_widths_are_infinitely_far():
    assert differences({"embed": np.zeros((2, 3))}, {"embed": np.zeros((2, 4))}, 0.1)["embed"].error == np.inf


def test_the_worst_sample():
    assert worst_sample(np.array([0.1, 0.2, 0.0, 0.5, 0.1]), np.array([0, 2, 4, 5])) == 1
    assert worst_sample(np.array([0.1, np.nan]), np.array([0, 1, 2])) == 1


def test_the_tolerance_follows_dtype_and_depth():
    assert tolerance_of("float32", 60) == 1e-4
    assert tolerance_of("bfloat16", 4) == pytest.approx(0.16)
    assert tolerance_of("bfloat16", 30) == pytest.approx(0.55)
    assert Difference("log_prob", 1.5e-4).is_above(1e-4) is False, "twice as many nats"
    assert Difference("final_norm", 1.5e-4).is_above(1e-4)
