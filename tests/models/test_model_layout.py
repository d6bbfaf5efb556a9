"""Which layouts are possible, and where each tensor lives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.config.schema import Parallel
from vime.models import ModelSpec, check_layout, layer_map, placement, rank_names

SPEC = ModelSpec(
    family="qwen3",
    num_layers=8,
    hidden_size=48,
    num_attention_heads=6,
    num_query_groups=2,
    head_dim=8,
    ffn_hidden_size=96,
    vocab_size=50,
    is_tied=False,
    has_qkv_bias=False,
    has_qk_norm=True,
    rms_norm_eps=1e-6,
    rope={"rope_type": "default", "rope_theta": 1e4},
    max_position_embeddings=64,
    dtype="float32",
)


def test_layers_by_hand():
    assert layer_map(SPEC, Parallel()) == [[list(range(8))]]
    assert layer_map(SPEC, Parallel(pp=2)) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    assert layer_map(SPEC, Parallel(pp=2, vpp=2)) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert layer_map(SPEC, Parallel(pp=2, num_layers_in_first_stage=3)) == [[[0, 1, 2]], [[3, 4, 5, 6, 7]]]
    both = Parallel(pp=3, num_layers_in_first_stage=1, num_layers_in_last_stage=2)
    assert layer_map(SPEC, both) == [[[0]], [[1, 2, 3, 4, 5]], [[6, 7]]]
    uneven = Parallel(pp=2, vpp=2, num_layers_in_first_stage=2)
    assert layer_map(SPEC, uneven) == [[[0], [4]], [[1, 2, 3], [5, 6, 7]]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 4}, "parallel.tp = 4: does not divide num_attention_heads = 6 (try 1, 2, 3, 6)"),
        ({"tp": 3}, "parallel.tp = 3: neither divides nor is a multiple of the key/value heads = 2 (try 1, 2)"),
        ({"tp": 6}, "parallel.tp = 6: does not divide the 80 rows of query, key and value (try 1, 2)"),
        ({"ep": 2, "dp": 2}, "parallel.ep = 2: qwen3 has no experts to split"),
        ({"etp": 2}, "parallel.etp = 2: qwen3 has no experts to split"),
        ({"tp": 5}, "parallel.tp = 5: does not divide ffn_hidden_size = 96"),
        ({"sequence_parallel": True}, "parallel.sequence_parallel = True: needs parallel.tp > 1"),
        ({"pp": 3}, "parallel.pp = 3: does not divide num_layers = 8 (try 1, 2, 4, 8, or set uneven stages)"),
        ({"vpp": 2}, "parallel.vpp = 2: needs parallel.pp > 1"),
        ({"pp": 2, "vpp": 1}, "parallel.vpp = 1: is no interleaving"),
        ({"pp": 2, "vpp": 3}, "parallel.vpp = 3: does not divide the 4 layers of pipeline stage 0 (try 1, 2, 4)"),
        ({"num_layers_in_first_stage": 2}, "parallel.num_layers_in_first_stage = 2: needs parallel.pp > 1"),
        ({"pp": 2, "num_layers_in_last_stage": 8}, "parallel.num_layers_in_last_stage = 8: leaves 0 of num_layers = 8"),
        (
            {"pp": 2, "num_layers_in_first_stage": 3, "num_layers_in_last_stage": 4},
            "parallel.num_layers_in_first_stage = 3, parallel.num_layers_in_last_stage = 4: leaves 1 of num_layers = 8",
        ),
    ],
)
def test_impossible_layouts_say_what_to_try(options, message):
    assert any(problem.startswith(message) for problem in check_layout(SPEC, Parallel(**options)))


@pytest.mark.parametrize("options", [{}, {"tp": 2, "sequence_parallel": True}, {"pp": 4, "vpp": 2}, {"cp": 4}])
def test_possible_layouts_have_no_problem(options):
    assert check_layout(SPEC, Parallel(**options)) == []


@settings(max_examples=100, deadline=None)
@given(
    num_layers=st.integers(1, 12),
    pp=st.integers(1, 5),
    vpp=st.sampled_from([None, 2, 3]),
    first=st.one_of(st.none(), st.integers(1, 6)),
    last=st.one_of(st.none(), st.integers(1, 6)),
    is_tied=st.booleans(),
)
def test_every_accepted_layout_places_each_tensor_once(num_layers, pp, vpp, first, last, is_tied):
    spec = replace(SPEC, num_layers=num_layers, is_tied=is_tied)
    parallel = Parallel(pp=pp, vpp=vpp, num_layers_in_first_stage=first, num_layers_in_last_stage=last)
    if check_layout(spec, parallel):
        return
    layers = [layer for chunks in layer_map(spec, parallel) for chunk in chunks for layer in chunk]
    assert sorted(layers) == list(range(num_layers))
    placed = [name for rank in range(pp) for names in rank_names(spec, parallel, rank).values() for name in names]
    assert sorted(placed) == sorted(spec.tensors())


def test_local_layer_ids_used_as_global_are_caught(monkeypatch):
    """Case W01: with pp 2 both stages would own layers 0..3."""
    monkeypatch.setattr(placement, "layer_map", lambda spec, parallel: [[[0, 1, 2, 3]], [[0, 1, 2, 3]]])
    problems = check_layout(SPEC, Parallel(pp=2))
    name = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    hf = "model.layers.0.input_layernorm.weight"
    assert f"parallel: {hf} is in {name} of stage 0 and in {name} of stage 1" in problems
