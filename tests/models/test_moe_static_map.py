"""Every rank's map of names, proven a bijection onto the checkpoint; and what a wrong map is caught by."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.config.schema import Parallel
from vime.models import ModelSpec, check_layout, rank_names, static_map
from vime.models.placement import Part, expert_map, prove, rank_maps

SPEC = ModelSpec(
    family="qwen3_moe",
    num_layers=4,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=8,
    ffn_hidden_size=64,
    vocab_size=51,
    is_tied=False,
    has_qkv_bias=False,
    has_qk_norm=True,
    rms_norm_eps=1e-6,
    rope={"rope_type": "default", "rope_theta": 1e4},
    max_position_embeddings=64,
    dtype="float32",
    num_experts=8,
    num_experts_per_token=2,
    expert_ffn_hidden_size=24,
)
DENSE = replace(SPEC, family="qwen3", num_experts=0, num_experts_per_token=0, expert_ffn_hidden_size=0)
LARGE = replace(SPEC, num_layers=94, hidden_size=4096, num_attention_heads=64, num_query_groups=4, num_experts=128)


def test_one_rank_holds_everything():
    (only,) = static_map(SPEC, Parallel()).ranks
    assert only.experts == tuple(range(8))
    assert only.layers == ((0, 1, 2, 3),)
    assert {hf for part in only.tensors.values() for hf in part.hf} == set(SPEC.tensors())
    assert only.num_elements == SPEC.num_parameters
    assert only.tensors["decoder.layers.3.mlp.experts.linear_fc1.weight5"] == Part(
        ("model.layers.3.mlp.experts.5.gate_proj.weight", "model.layers.3.mlp.experts.5.up_proj.weight"),
        (48, 16),
        is_expert=True,
    )


def test_parts_by_hand():
    """Case W10: expert parallel 2 with expert-tensor parallel 1 over tp 2 and dp 2, two stages."""
    found = static_map(SPEC, Parallel(tp=2, pp=2, dp=2, ep=2, sequence_parallel=True))
    assert found.problems == []
    assert [(r.ranks, r.pp, r.tp, r.ep) for r in found.ranks] == [
        ((0, 2), 0, 0, 0),
        ((1, 3), 0, 1, 1),
        ((4, 6), 1, 0, 0),
        ((5, 7), 1, 1, 1),
    ]
    third = found.of_rank(5)
    assert third.layers == ((2, 3),)
    assert third.experts == (4, 5, 6, 7)
    names = [name for name in third.tensors if ".experts." in name]
    assert names[:2] == [f"decoder.layers.2.mlp.experts.linear_fc1.weight{i}" for i in (4, 5)]
    assert len(names) == 2 * 4 * 2
    qkv = third.tensors["decoder.layers.2.self_attention.linear_qkv.weight"]
    assert (qkv.shape, qkv.dim, qkv.of, third.slice(qkv)) == ((32, 16), 0, 2, (32, 64))
    down = third.tensors["decoder.layers.2.mlp.experts.linear_fc2.weight4"]
    assert (down.shape, down.dim, third.slice(down)) == ((16, 24), None, (0, 0))
    head = third.tensors["output_layer.weight"]
    assert (head.shape, third.slice(head)) == ((26, 16), (26, 52))  # 51 words and a row of padding
    assert [(row.layers, row.experts, row.num_tensors) for row in found.rows()] == [
        ("0-1", "0-3", 1 + 2 * 15),
        ("0-1", "4-7", 1 + 2 * 15),
        ("2-3", "0-3", 2 + 2 * 15),
        ("2-3", "4-7", 2 + 2 * 15),
    ]


def test_expert_tensor_parallel_splits_inside_an_expert():
    found = static_map(SPEC, Parallel(tp=2, sequence_parallel=True))
    assert found.problems == []
    second = found.of_rank(1)
    assert second.experts == tuple(range(8))
    down = second.tensors["decoder.layers.0.mlp.experts.linear_fc2.weight7"]
    assert (down.shape, down.dim, second.slice(down)) == ((16, 12), 1, (12, 24))


def test_a_tied_models_copy_is_on_the_last_stage_alone():
    """Case W04: middle stages contribute no embedding, and the copy belongs to nobody."""
    found = static_map(replace(DENSE, is_tied=True), Parallel(pp=4))
    assert found.problems == []
    holders = [[name for name in r.tensors if "embedding" in name or "output" in name] for r in found.ranks]
    assert holders == [["embedding.word_embeddings.weight"], [], [], ["output_layer.weight"]]
    assert found.ranks[3].tensors["output_layer.weight"].is_copy
    assert all("lm_head.weight" not in part.hf for r in found.ranks for part in r.tensors.values())


@settings(max_examples=60, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    vpp=st.sampled_from([None, 2]),
    cp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 2, 3, 4]),
    ep=st.sampled_from([1, 2, 4, 8]),
    etp=st.sampled_from([None, 1, 2, 4]),
    is_tied=st.booleans(),
)
def test_every_possible_layout_is_a_bijection(tp, pp, vpp, cp, dp, ep, etp, is_tied):
    spec = replace(SPEC, is_tied=is_tied)
    parallel = Parallel(tp=tp, pp=pp, vpp=vpp, cp=cp, dp=dp, ep=ep, etp=etp, sequence_parallel=tp > 1)
    problems = check_layout(spec, parallel)
    if problems:
        assert not any(" is on no rank" in p or "make up" in p or "part -> ranks" in p for p in problems), problems
        return
    found = static_map(spec, parallel)
    assert sorted(rank for r in found.ranks for rank in r.ranks) == list(range(parallel.world_size))
    owned = [hf for stage in range(pp) for names in rank_names(spec, parallel, stage).values() for hf in names]
    assert sorted(owned) == sorted(spec.tensors())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 2}, "parallel.tp = 2: a model of experts needs parallel.sequence_parallel = true"),
        ({"ep": 3, "dp": 3}, "parallel.ep = 3: does not divide num_experts = 8 (try 1, 2, 4, 8)"),
        ({"ep": 2}, "parallel.ep x etp = 2 x 1: does not divide tp x cp x dp = 1"),
        ({"etp": 5, "dp": 5}, "parallel.etp = 5: does not divide moe_intermediate_size = 24"),
    ],
)
def test_impossible_expert_layouts_say_why(options, message):
    assert any(problem.startswith(message) for problem in check_layout(SPEC, Parallel(**options)))


# ---------------------------------------------------------------- wrong maps


def _proved(parallel, change, spec=SPEC):
    """Problems after ``change(rank map) -> rank map`` on every rank."""
    return prove(spec, parallel, [change(found) for found in rank_maps(spec, parallel)])


def _renamed(found, edit):
    return replace(found, tensors={edit(n): replace(p, hf=tuple(map(edit, p.hf))) for n, p in found.tensors.items()})


def test_local_layer_ids_are_caught():
    """Case W01: stage 1 writes layers 0 and 1 again."""

    def local(found):
        return _renamed(found, lambda n: n.replace("layers.2.", "layers.0.").replace("layers.3.", "layers.1."))

    problems = _proved(Parallel(pp=2), local)
    assert any("model.layers.0." in p and "of stage 0 and in" in p for p in problems)


@pytest.mark.parametrize("options", [{"ep": 2, "dp": 2}, {"ep": 2, "dp": 2, "pp": 2}], ids=str)
def test_local_expert_ids_are_caught(options):
    """Case W10: rank 1 holds experts 0..3 again; also with one stage."""

    def local(found):
        def edit(name):
            for old, new in zip(range(4, 8), range(4), strict=True):
                name = name.replace(f"experts.{old}.", f"experts.{new}.")
                if ".experts.linear" in name:
                    name = name.removesuffix(f"weight{old}") + (f"weight{new}" if name.endswith(f"weight{old}") else "")
            return name

        return _renamed(found, edit)

    problems = _proved(Parallel(**options), local)
    assert "model.layers.0.mlp.experts.4.gate_proj.weight is on no rank" in problems
    assert not any(p.startswith("model.layers.0.mlp.experts.0.") for p in problems)
    short = replace(SPEC, num_layers=2, num_experts=2)
    doubled = _proved(Parallel(ep=2, dp=2), lambda f: _renamed(f, lambda n: n.replace("weight1", "weight0")), short)
    assert any("linear_fc1.weight0" in p and "part -> ranks is {0: 2}, must be {0: 1}" in p for p in doubled)


def test_a_missing_tensor_a_foreign_one_and_a_wrong_shape_are_caught():
    def without(found):
        return replace(found, tensors={n: p for n, p in found.tensors.items() if n != "decoder.final_layernorm.weight"})

    assert _proved(Parallel(pp=2), without) == ["model.norm.weight is on no rank"]

    def foreign(found):
        return _renamed(found, lambda n: n.replace("model.norm.", "model.norms."))

    problems = _proved(Parallel(), foreign)
    assert problems[0].startswith("model.norms.weight (in decoder.final_layernorm.weight of rank 0) is no tensor")

    def transposed(found):
        name = "decoder.layers.1.mlp.router.weight"
        return replace(found, tensors={**found.tensors, name: replace(found.tensors[name], shape=(16, 8))})

    (problem,) = _proved(Parallel(), transposed)
    assert problem.startswith("decoder.layers.1.mlp.router.weight on rank 0: 1 parts of [16, 8] along None make up")


def test_a_part_that_no_rank_holds_is_caught():
    """Both tensor-parallel ranks hold the first half."""
    parallel = Parallel(tp=2, sequence_parallel=True)
    problems = prove(SPEC, parallel, [replace(found, tp=0, etp=0) for found in rank_maps(SPEC, parallel)])
    assert any("in 2 parts along 0: part -> ranks is {0: 2}, must be {0: 1, 1: 1}" in p for p in problems)


def test_a_doubled_tensor_is_caught():
    def doubled(found):
        extra = {"decoder.final_layernorm.weight": Part(("model.norm.weight",), (16,))}
        return replace(found, tensors={**found.tensors, **extra})

    problems = _proved(Parallel(pp=2), doubled)
    wanted = "model.norm.weight is in decoder.final_layernorm.weight of stage 0 and in decoder.final_layernorm.weight"
    assert problems[0] == f"{wanted} of stage 1"


def test_the_large_model_is_proven():
    parallel = Parallel(tp=4, pp=2, dp=16, ep=16, sequence_parallel=True)
    found = static_map(LARGE, parallel)
    assert found.problems == []
    assert sum(len(r.ranks) for r in found.ranks) == parallel.world_size
    assert expert_map(LARGE, parallel)[15] == list(range(120, 128))
