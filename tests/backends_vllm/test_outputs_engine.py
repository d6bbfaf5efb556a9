"""Outputs and routing of a real engine at the named points, against transformers; faults located by bisection."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models
from conftest import Engine, make_config

from vime.align.bisect import Bisection, Side, bisect
from vime.align.hf_outputs import HfOutputs
from vime.align.points import EXPERTS, all_points, point
from vime.errors import VimeError
from vime.types import RolloutBatch, Sample
from vime.weights.checkpoint import checkpoint_manifest

IDS = np.random.default_rng(3).integers(10, 500, 70).astype(np.int32)
POINTS = all_points(4, True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return tiny_models.save(tiny_models.build("qwen3_moe", 7), tmp_path_factory.mktemp("moe") / "model")


@pytest.fixture(scope="module")
def engine(host, folder) -> Engine:
    vllm = {"max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 32, "block_size": 32}
    return Engine(host, "moe", make_config(folder, vllm=vllm))


def relative(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max() / np.abs(other).max())


def test_every_point_is_that_of_transformers_and_later_forwards_are_not_disturbed(engine, folder):
    before = engine("score", IDS)
    found = engine("outputs", IDS, POINTS)
    assert list(found) == list(POINTS)
    expected = HfOutputs(folder).outputs(IDS, POINTS)
    for name in POINTS:
        assert found[name].shape == expected[name].shape, name
        assert relative(found[name], expected[name]) < 2e-5, name
    assert np.array_equal(before, engine("score", IDS))
    assert np.array_equal(found["log_prob"][:, 0], before)
    assert engine("rpc", "vime_hooks") == [0]


def test_routing_is_that_of_transformers(engine, folder):
    spans = (IDS[:40], IDS[40:])
    samples = [Sample(i, 0, ids, 2, np.arange(len(ids)) >= 2, np.zeros(len(ids))) for i, ids in enumerate(spans)]
    routing = engine("routing", RolloutBatch.from_samples(0, samples))
    assert routing.layers == (0, 1, 2, 3)
    assert routing.experts_TMK.shape == (70, 4, 2)
    hf = HfOutputs(folder)
    for layer in routing.layers:
        expected = np.concatenate([hf.outputs(ids, [point(layer, EXPERTS)])[point(layer, EXPERTS)] for ids in spans])
        assert np.array_equal(routing.experts_TMK[:, layer], expected.astype(np.int16))
    assert (routing.margins_TM > 0).all()


def test_a_sequence_that_fills_the_context_is_refused(engine):
    with pytest.raises(VimeError, match="from 2 to 127 fit into the context"):
        engine("outputs", np.zeros(128, np.int32), ["embed"])


def test_a_point_that_is_none_is_refused_and_no_hook_stays(engine):
    with pytest.raises(VimeError, match=r"'layers\.9\.out' is no point of this model"):
        engine("outputs", IDS, ["embed", "layers.9.out"])
    assert engine("rpc", "vime_hooks") == [0]


def bisected(engine: Engine, folder: str) -> Bisection:
    """The live engine against transformers; its weights by digest against those of the folder."""
    hf = HfOutputs(folder)
    dtypes = {spec.name: spec.dtype for spec in engine("weight_specs")}
    one = Side("engine", lambda ids, points: engine("outputs", ids, list(points)), lambda: engine("held"))
    other = Side("hf", hf.outputs, lambda: checkpoint_manifest(folder, dtypes))
    return bisect(one, other, IDS, 4, True, 1e-4)


def test_a_lost_rotary_cache_is_located(engine, folder):
    engine("plant", "zero-rotary")
    found = bisected(engine, folder)
    engine("heal")
    assert found.first is not None
    assert found.first.point == "layers.0.attn_out"
    assert max(d.error for d in found.inside[:4]) < 1e-5, "norm, q, k and v agree"
    assert [(weight.name, weight.is_equal) for weight in found.weights] == [
        ("model.layers.0.self_attn.o_proj.weight", True)
    ]
    assert "rotary cache" in found.cause


def test_once_healed_no_point_is_above(engine, folder):
    found = bisected(engine, folder)
    assert found.first is None
    assert 0 < found.largest.error < 2e-5
    assert "no point above tolerance" in found.sentence


def test_swapped_layers_are_located_and_their_weights_named(engine, folder):
    engine("plant", "swapped-layers")
    found = bisected(engine, folder)
    engine("plant", "swapped-layers")  # and back
    assert found.first is not None
    assert found.first.point == "layers.0.attn_in"
    assert [(weight.name, weight.is_equal) for weight in found.weights] == [
        ("model.layers.0.input_layernorm.weight", False)
    ]


def test_a_nan_is_located(engine, folder):
    engine("plant", "nan-weight")  # layer 2, the first matrix
    found = bisected(engine, folder)
    assert found.first is not None
    assert (found.first.point, found.first.error) == ("layers.2.q", np.inf)
    assert {weight.name: weight.is_equal for weight in found.weights} == {
        "model.layers.2.self_attn.q_proj.weight": False,
        "model.layers.2.self_attn.q_norm.weight": True,
    }
