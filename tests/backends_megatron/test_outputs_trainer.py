"""Outputs of the real trainer at the named points, against transformers, under every kind of layout."""

from __future__ import annotations

import itertools
from typing import Any

import jobs
import numpy as np
import pytest
from output_jobs import around, experts_of, noise

from vime.align.bench import joined_routing
from vime.align.hf_outputs import HfOutputs
from vime.align.points import EXPERTS, all_points, layer_of, point
from vime.align.routing import differs
from vime.models import load_spec

IDS = np.random.default_rng(5).integers(0, 128, 21)
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
LAYOUTS = {
    "one process": ({}, 1),
    "tp 2, sequence parallel": ({"tp": 2, "sequence_parallel": True}, 2),
    "tp 4: more ranks than key/value heads": ({"tp": 4}, 4),
    "pp 2, two virtual stages": ({"pp": 2, "vpp": 2}, 2),
    "cp 2": ({"cp": 2}, 2),
}


def merged(parts: list[dict[str, Any] | None]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for part in filter(None, parts):
        assert not found.keys() & part.keys(), "one point from two ranks"
        found |= part
    return found


def furthest(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """Of all points and tokens, the largest |difference| relative to the largest value of the point."""
    assert one.keys() == other.keys()
    assert all(one[name].shape == other[name].shape for name in one)
    return max(float(np.abs(one[name] - other[name]).max() / np.abs(other[name]).max()) for name in one)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_point_is_that_of_transformers_and_later_forwards_are_not_disturbed(pool, tiny, layout):
    parallel, size = LAYOUTS[layout]
    path = tiny("qwen3")
    points = all_points(load_spec(str(path)).num_layers, False)
    answers = pool.run(size, around, jobs.config(path, parallel=parallel), IDS, points)
    found = merged([outputs for outputs, _, _ in answers])
    assert furthest(found, dict(HfOutputs(str(path)).outputs(IDS, points))) < 2e-5
    assert all(is_same for _, is_same, _ in answers), "log-probs moved"
    assert all(not left for _, _, left in answers), "hooks stayed behind"


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_other_families(pool, tiny, family):
    path = tiny(family)
    points = all_points(load_spec(str(path)).num_layers, False)
    ((found, is_same, left),) = pool.run(1, around, jobs.config(path), IDS, points)
    assert list(found) == list(points)
    assert furthest(found, dict(HfOutputs(str(path)).outputs(IDS, points))) < 2e-5
    assert is_same
    assert not left


def test_only_what_is_asked_for_is_kept(pool, tiny):
    path = tiny("qwen3")
    ((found, _, _),) = pool.run(1, around, jobs.config(path), IDS, ("layers.2.out", "layers.2.k"))
    assert {name: value.shape for name, value in found.items()} == {"layers.2.k": (21, 32), "layers.2.out": (21, 64)}


def test_a_point_that_is_none_is_refused(pool, tiny):
    with pytest.raises(Exception, match=r"'layers\.4\.out' is no point of this model"):
        pool.run(1, around, jobs.config(tiny("qwen3")), IDS, ("layers.4.out",))


def test_a_dense_model_routes_no_tokens(pool, tiny):
    (said,) = pool.run(1, experts_of, jobs.config(tiny("qwen3")))
    assert "without experts" in said


def test_a_noisy_kernel_is_named_by_two_forwards(pool, tiny):
    ((said, found, is_healed),) = pool.run(1, noise, jobs.config(tiny("qwen3")), IDS)
    assert "layer 2" in said
    assert found.first is not None
    assert layer_of(found.first.point) == 2
    assert is_healed


MIXED = {
    "one process": ({}, 1),
    "ep 2": ({"dp": 2, "ep": 2}, 2),
    "pp 2": ({"pp": 2}, 2),
    "tp 2, sequence parallel": ({"tp": 2, "sequence_parallel": True}, 2),
}


@pytest.mark.parametrize("layout", MIXED)
def test_outputs_and_experts_of_a_mixture_are_those_of_transformers(pool, tiny, layout):
    parallel, size = MIXED[layout]
    path = tiny("qwen3_moe", **MIXTURE)
    settings, points = jobs.config(path, parallel=parallel), all_points(load_spec(str(path)).num_layers, True)
    hf = HfOutputs(str(path))
    answers = pool.run(size, around, settings, IDS, points)
    assert furthest(merged([outputs for outputs, _, _ in answers]), dict(hf.outputs(IDS, points))) < 2e-5
    assert all(is_same and not left for _, is_same, left in answers)
    batch = jobs.batch()
    routing = joined_routing(batch, [part for part in pool.run(size, experts_of, settings) if part is not None])
    assert routing.layers == (0, 1, 2, 3)
    asked = [point(layer, EXPERTS) for layer in routing.layers]
    spans = [batch.token_ids_T[a:b] for a, b in itertools.pairwise(batch.offsets)]
    found = [hf.outputs(ids, asked) for ids in spans]
    expected = np.stack([np.concatenate([one[name] for one in found]) for name in asked], 1).astype(np.int16)
    assert np.array_equal(routing.experts_TMK, expected)
    assert (routing.margins_TM > 0).all()


def test_a_biased_router_prefers_its_expert_by_more_than_rounding(pool, tiny):
    settings = jobs.config(tiny("qwen3_moe", **MIXTURE))
    ((_, clean),), ((_, biased),) = pool.run(1, experts_of, settings), pool.run(1, experts_of, settings, "router-bias")
    places = differs(clean.experts_TMK, biased.experts_TMK)
    assert not places[:, :2].any(), "before layer 2"
    assert places[:, 2].any()
    gained = (biased.experts_TMK[:, 2] == 3).any(-1) & ~(clean.experts_TMK[:, 2] == 3).any(-1)
    assert np.array_equal(gained, places[:, 2]), "only towards the preferred expert"
    assert clean.margins_TM[:, 2][places[:, 2]].max() > 1e-3
