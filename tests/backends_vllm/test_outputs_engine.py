"""Outputs and routing of a real engine at the named points, against transformers; a prefill in chunks."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models
from conftest import Engine, make_config

from vime.align.hf_outputs import HfOutputs
from vime.align.points import EXPERTS, all_points, point
from vime.errors import VimeError
from vime.types import RolloutBatch, Sample

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


def test_a_zero_rotary_cache_shows_in_attention_and_not_before(engine, folder):
    engine("plant", "zero-rotary")
    points = [point(0, part) for part in ("q", "k", "v", "attn_out")]
    found, expected = engine("outputs", IDS, points), HfOutputs(folder).outputs(IDS, points)
    assert max(relative(found[name], expected[name]) for name in points[:3]) < 2e-5
    assert relative(found[points[3]], expected[points[3]]) > 0.01
