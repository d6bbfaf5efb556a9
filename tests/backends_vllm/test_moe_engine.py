"""Experts in a live engine: read back bitwise, also from packed kernels and from two ranks, and right after updates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from conftest import Engine, make_config, make_prompt
from sending import checkpoint_manifest, send, tensors_of

from vime.backends.vllm.live import unpacked
from vime.errors import VimeError
from vime.types import TensorEntry
from vime.weights.manifest import compare
from vime.weights.shm import batches

IDS = np.arange(3, 120)
W13 = "model.layers.1.mlp.experts.routed_experts.w13_weight"


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of experts, and a dense one, which two ranks share in other ways (fused qkv, gate and up)."""
    root = tmp_path_factory.mktemp("experts")
    for name, kind, seed in [("moe", "qwen3_moe", 0), ("moe2", "qwen3_moe", 1), ("dense", "qwen3", 2)]:
        tiny_models.save(tiny_models.build(kind, seed), root / name)
    return {p.name: p for p in root.iterdir()}


@pytest.fixture(scope="module")
def engines(host, experts) -> dict[int, Engine]:
    """By tensor-parallel size."""
    path = str(experts["moe"])
    return {tp: Engine(host, f"moe-tp{tp}", make_config(path, rollout={"engine_tp": tp})) for tp in (1, 2)}


@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_held_is_the_checkpoint_bitwise(engines, experts, tp) -> None:
    assert compare(checkpoint_manifest(experts["moe"]), engines[tp]("held")) == []


@pytest.mark.parametrize("tp", [1, 2])
def test_an_updated_engine_equals_a_fresh_one_bitwise(host, engines, experts, tp) -> None:
    """vLLM packs experts for its CPU kernel after the first load; each update must pack, and be read back, again."""
    engine = engines[tp]
    before = engine("score", IDS)
    fresh = Engine(host, f"fresh-tp{tp}", make_config(str(experts["moe2"]), rollout={"engine_tp": tp}))
    expected = fresh("score", IDS)
    fresh("shutdown")
    assert np.abs(before - expected).max() > 0.1
    for version, name, scores in [(1, "moe2", expected), (2, "moe", before)]:
        sent, received, held = send(engine, version, tensors_of(experts[name]))
        for side in (sent, received, held, engine("held")):
            assert compare(checkpoint_manifest(experts[name]), side) == []
        assert (engine("score", IDS) == scores).all()
        (sample,) = engine("generate", make_prompt(), [1])
        assert sample.weight_version_min == version


def test_engines_of_one_and_two_ranks_agree_with_transformers(engines, experts) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(experts["moe"], dtype=torch.float32)
    with torch.no_grad():
        log_p = model(torch.from_numpy(IDS)[None]).logits[0].log_softmax(-1)
    oracle = log_p[:-1].gather(1, torch.from_numpy(IDS)[1:, None])[:, 0].numpy()
    for engine in engines.values():
        assert np.abs(engine("score", IDS)[1:] - oracle).max() <= 1e-5


@pytest.mark.parametrize("tp", [1, 2])
def test_experts_under_each_others_numbers_are_named(engines, experts, tp) -> None:
    """Case W10: experts 0..3 sent once more as 4..7 have every shape right."""
    right = tensors_of(experts["moe"])
    wrong = {
        name: right[name.replace(f"experts.{name.split('.')[5]}.", f"experts.{int(name.split('.')[5]) % 4}.")].clone()
        if ".experts." in name
        else tensor
        for name, tensor in right.items()
    }
    _, received, held = send(engines[tp], 3, wrong, expected=right)
    expected = {name for name in right if ".experts." in name and int(name.split(".")[5]) >= 4}
    checkpoint = checkpoint_manifest(experts["moe"])
    assert {d.name for d in compare(checkpoint, held)} == expected == {d.name for d in compare(checkpoint, received)}
    with pytest.raises(VimeError, match="version 3 is not what was sent"):
        engines[tp]("generate", make_prompt(), [1])
    send(engines[tp], 4, right)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_packed_tensor_is_read_not_remembered(engines, experts, tp) -> None:
    engines[tp]("rpc", "vime_plant", W13, 0.5)
    found = compare(checkpoint_manifest(experts["moe"]), engines[tp]("held"))
    assert {(d.kind, d.name) for d in found} == {
        ("value", f"model.layers.1.mlp.experts.{i}.{part}_proj.weight") for i in range(8) for part in ("gate", "up")
    }
    send(engines[tp], 5, tensors_of(experts["moe"]))
    assert compare(checkpoint_manifest(experts["moe"]), engines[tp]("held")) == []


def test_a_dense_engine_of_two_ranks_is_read_back_whole(host, experts) -> None:
    engine = Engine(host, "dense-tp2", make_config(str(experts["dense"]), rollout={"engine_tp": 2}))
    assert compare(checkpoint_manifest(experts["dense"]), engine("held")) == []
    engine("rpc", "vime_plant", "model.layers.2.input_layernorm.weight", 3.0, 1)
    with pytest.raises(VimeError, match=r"rank [01] holds of 1 tensors .*model\.layers\.2\.input_layernorm\.weight"):
        engine("held")
    engine("shutdown")


def test_widths_that_the_kernel_must_pad_are_read_back_too(host, tmp_path) -> None:
    """48 is no multiple of what vLLM's kernel takes."""
    path = tiny_models.save(tiny_models.build("qwen3_moe", 3, moe_intermediate_size=48), tmp_path / "narrow")
    engine = Engine(host, "narrow", make_config(path))
    assert compare(checkpoint_manifest(Path(path)), engine("held")) == []
    before = engine("score", IDS)
    _, _, held = send(engine, 1, tensors_of(Path(path)))
    assert compare(checkpoint_manifest(Path(path)), held) == []
    assert (engine("score", IDS) == before).all()
    engine("shutdown")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpacking_is_the_inverse_of_packing(dtype) -> None:
    from vllm._custom_ops import cpu_prepack_moe_weight

    weight = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = cpu_prepack_moe_weight(weight, "vec")
    assert not torch.equal(packed, weight)
    assert torch.equal(unpacked(packed, "vec"), weight)


def test_batches_keep_the_order_and_the_limit() -> None:
    entries = [TensorEntry(str(i), (size,), "float32") for i, size in enumerate([10, 20, 30, 100, 1])]
    assert [[e.name for e in batch] for batch in batches(entries, 240)] == [["0", "1", "2"], ["3"], ["4"]]
    assert [len(batch) for batch in batches(entries, 1)] == [1] * 5
    assert list(batches([], 1)) == []
