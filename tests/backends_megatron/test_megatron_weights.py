"""Every tensor accounted for, in and out; and what is refused."""

from __future__ import annotations

import json
import shutil

import jobs
import numpy as np
import pytest
import random_models

LAST = "model.layers.3.mlp.down_proj.weight"


def _without_last(t):
    return {k: v for k, v in t.items() if not k.startswith("model.layers.3.")}


def _renamed(t):
    return {k.replace("layers.2.mlp.up_proj", "layers.2.mlp.upp_proj"): v for k, v in t.items()}


FAULTS = {
    "a layer is missing": (_without_last, ["missing (11)", "model.layers.3.input_layernorm.weight", "and 1 more"]),
    "a key is renamed": (
        _renamed,
        ["missing (1): model.layers.2.mlp.up_proj.weight", "unexpected (1): model.layers.2"],
    ),
    "a shape is wrong": (
        lambda t: {**t, LAST: np.ascontiguousarray(t[LAST].T)},
        [f"wrong shape (1): {LAST} is [96, 64], config.json says [64, 96]"],
    ),
    "a layer is too many": (
        lambda t: {**t, "model.layers.4.input_layernorm.weight": t["model.norm.weight"]},
        ["unexpected (1): model.layers.4.input_layernorm.weight"],
    ),
}


def test_faulty_folders_are_refused(pool, tiny, tmp_path):
    for number, (edit, messages) in enumerate(FAULTS.values()):
        folder = random_models.rewrite(tiny(), tmp_path / str(number), edit)
        said = pool.run(1, jobs.refusal, jobs.config(folder))[0]
        for message in messages:
            assert message in said
    empty = random_models.rewrite(tiny(), tmp_path / "empty", dict)
    (empty / "model.safetensors").unlink()
    assert "no *.safetensors" in pool.run(1, jobs.refusal, jobs.config(empty))[0]
    (empty / "model.safetensors").write_bytes(b"\x10" * 40)
    assert "cannot be read" in pool.run(1, jobs.refusal, jobs.config(empty))[0]


def test_only_the_files_of_the_index_count_and_no_tensor_is_in_two(pool, tiny, tmp_path):
    folder = random_models.rewrite(tiny(), tmp_path / "indexed", dict)
    shutil.copyfile(folder / "model.safetensors", folder / "model-00001.safetensors")
    assert "in another file too" in pool.run(1, jobs.refusal, jobs.config(folder))[0]
    (folder / "model.safetensors").write_bytes(b"an older file, which the index does not name")
    index = dict.fromkeys(random_models.tensors(tiny()), "model-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert pool.run(1, jobs.refusal, jobs.config(folder))[0] == "no error"


def test_a_tied_model_may_repeat_its_embedding_as_lm_head_but_not_another(pool, tiny, tmp_path):
    def repeated(t):
        return {**t, "lm_head.weight": t["model.embed_tokens.weight"].copy()}

    def other(t):
        return {**t, "lm_head.weight": t["model.embed_tokens.weight"] + 1}

    same = random_models.rewrite(tiny("qwen3", True), tmp_path / "same", repeated)
    assert pool.run(1, jobs.refusal, jobs.config(same))[0] == "no error"
    differing = random_models.rewrite(tiny("qwen3", True), tmp_path / "other", other)
    assert "unexpected (1): lm_head.weight" in pool.run(1, jobs.refusal, jobs.config(differing))[0]


def test_the_reference_folder_is_checked_too(pool, tiny, tmp_path):
    broken = random_models.rewrite(tiny(), tmp_path / "broken", _without_last)
    assert "missing (11)" in pool.run(1, jobs.refusal, jobs.config(tiny(), model={"ref_path": str(broken)}))[0]
    other = jobs.config(tiny(), model={"ref_path": str(tiny("qwen3", True, 131))})
    assert "vocab_size 131, the policy has 128" in pool.run(1, jobs.refusal, other)[0]


def test_impossible_layouts_and_derived_keys_are_refused_together(pool, tiny):
    settings = jobs.config(
        tiny(),
        parallel={"pp": 2, "vpp": 2},
        megatron={
            "transformer": {"batch_p2p_comm": True, "num_layers": 3},
            "optimizer": {"clip_grad": 0.0},
            "ddp": {"average_in_collective": True},
        },
    )
    said = pool.run(1, jobs.refusal, settings)[0].splitlines()
    assert [line.split(" = ")[0] for line in said] == [
        "megatron.transformer.batch_p2p_comm",
        "megatron.transformer.num_layers",
        "megatron.optimizer.clip_grad",
        "megatron.ddp.average_in_collective",
    ]
    assert "wrong gradients" in said[0]
    unknown = jobs.config(tiny(), megatron={"transformer": {"attention_backend": "flesh"}})
    assert "attention_backend = 'flesh': not one of flash, fused, unfused" in pool.run(1, jobs.refusal, unknown)[0]
    too_wide = pool.run(1, jobs.refusal, jobs.config(tiny(), parallel={"tp": 3}))[0]
    assert "parallel.tp = 3: does not divide num_attention_heads = 4 (try 1, 2, 4)" in too_wide
    assert "4 trainer" not in too_wide
    wrong_world = pool.run(1, jobs.refusal, jobs.config(tiny(), parallel={"dp": 4}))[0]
    assert "tp x pp x cp x dp = 4, but 1 trainer processes" in wrong_world


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_an_exported_folder_is_a_hugging_face_model(pool, tiny, tmp_path, layout):
    source = tiny("qwen3", True, 131)
    (source / "tokenizer.json").write_text("{}")
    settings = jobs.config(source, parallel=layout)
    out = tmp_path / "hf"
    out.mkdir()
    (out / "leftover").write_text("of an older export")
    scored = pool.run(settings.parallel.world_size, jobs.export, settings, str(out))[0]
    assert sorted(f.name for f in out.iterdir()) == sorted(f.name for f in source.iterdir())
    before, after = random_models.tensors(source), random_models.tensors(out)
    assert before.keys() == after.keys()
    assert after["model.embed_tokens.weight"].shape == (131, 64)
    assert not np.array_equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert random_models.config_json(out)["dtype"] == "float32"
    hf = random_models.hf_log_probs(out, [s.token_ids for s in jobs.batch(vocab=131).samples()])
    assert np.abs(hf - scored).max() < 1e-5


def test_overlapped_parameter_gather_is_finished_before_weights_are_read(pool, tiny):
    layout = {"dp": 2, "distributed_optimizer": True}
    plain = pool.run(2, jobs.overlap, jobs.config(tiny(), parallel=layout))[0]
    ddp = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    lapped = pool.run(2, jobs.overlap, jobs.config(tiny(), parallel=layout, megatron={"ddp": ddp}))[0]
    assert lapped["stats"].grad_norm == pytest.approx(plain["stats"].grad_norm, rel=1e-6)

    def furthest(which):
        return max(np.abs(lapped[which][name] - value).max() for name, value in plain["weights"].items())

    assert furthest("weights") < 2e-6
    assert furthest("stale") > 5e-4  # the fault this guards against: about one update of lr 1e-3


def test_bfloat16_trains(pool, tiny):
    rollout = jobs.batch()
    hf = random_models.hf_log_probs(tiny(), [s.token_ids for s in rollout.samples()])
    settings = jobs.config(tiny(), model={"dtype": "bfloat16"}, parallel={"pp": 2})
    outcome = pool.run(2, jobs.layout, settings, 128, hf)[0]
    assert np.array_equal(outcome.policy, outcome.ref)
    assert outcome.at_rest.grad_norm == 0.0
    assert 1e-4 < np.abs(outcome.policy - hf).max() < 0.3
    assert outcome.describe["tensors"]["policy"][1].endswith("cast float32 -> bfloat16")
    assert {spec.dtype for spec in outcome.specs} == {"bfloat16"}
    assert any(not np.array_equal(outcome.before[name], value) for name, value in outcome.after.items())
