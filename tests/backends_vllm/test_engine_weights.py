"""Weights go in whole or not at all, and what the engine holds is what was sent, bitwise."""

from __future__ import annotations

import asyncio
import os
import time

import numpy as np
import pytest
import tiny_models
import torch
from conftest import Engine, make_config, make_prompt
from sending import checkpoint_manifest, send, tensors_of

from vime.errors import UsageError, VimeError
from vime.weights.manifest import compare
from vime.weights.shm import WritePlan, write_weights
from vime.weights.transport import ShmTransport

IDS = np.arange(3, 120)


def fused(name: str) -> str:
    return f"model.layers.1.mlp.{name}_proj.weight"


@pytest.mark.parametrize("family", ["dense", "tied", "llama"])
def test_an_updated_engine_equals_a_fresh_one_bitwise(host, models, family: str) -> None:
    one = Engine(host, f"{family}-a", make_config(str(models[family])))
    two = Engine(host, f"{family}-b", make_config(str(models[family + "2"])))
    before = {e: e("score", IDS) for e in (one, two)}
    assert np.abs(before[one] - before[two]).max() > 0.1
    for engine, other, source in [(one, two, family + "2"), (two, one, family)]:
        checkpoint = checkpoint_manifest(models[source])
        sent, received, held = send(engine, 1, tensors_of(models[source]))
        for side in (sent, received, held):
            assert compare(checkpoint, side) == []
        assert (engine("score", IDS) == before[other]).all()
        (sample,) = engine("generate", make_prompt(), [1])
        assert (sample.weight_version_min, sample.weight_version_max) == (1, 1)
    assert compare(checkpoint_manifest(models[family + "2"]), one("held")) == []
    for engine in (one, two):
        engine("shutdown")


def test_specs_are_the_checkpoints_and_tied_heads_are_absent(dense: Engine, models) -> None:
    specs = {s.name: s for s in dense("weight_specs")}
    assert compare(checkpoint_manifest(models["dense"]), checkpoint_manifest(models["dense"])) == []
    assert set(specs) == set(tensors_of(models["dense"]))
    assert all(s.shape == tuple(tensors_of(models["dense"])[n].shape) for n, s in specs.items())
    assert specs["model.layers.3.mlp.up_proj.weight"].layer == 3
    assert "lm_head.weight" not in tensors_of(models["tied"])


def drop(t):
    del t[fused("up")]


def reshape(t):
    t["model.norm.weight"] = torch.ones(64)


def shift_layers(t):
    for name in [n for n in t if ".layers." in n]:
        t[name.replace(".layers.", ".layers.1")] = t.pop(name)


def to_bfloat16(t):
    t[fused("gate")] = t[fused("gate")].bfloat16()


def pad_vocabulary(t):
    t["lm_head.weight"] = torch.cat([t["lm_head.weight"], torch.zeros(64, 128)])


@pytest.mark.parametrize(
    ("fault", "messages"),
    [
        (drop, [r"missing: model.layers.1.mlp.up_proj.weight"]),
        (reshape, ["shape: model.norm.weight: [128] in the engine, [64] in the update"]),
        (shift_layers, ["missing: model.layers.3.", "unexpected: model.layers.13."]),
        (to_bfloat16, ["dtype: model.layers.1.mlp.gate_proj.weight: float32 in the engine, bfloat16 in the update"]),
        (pad_vocabulary, ["shape: lm_head.weight: [512, 128] in the engine, [576, 128] in the update"]),
    ],
)
def test_refused_updates_leave_the_engine_as_it_was(dense: Engine, models, fault, messages) -> None:
    """Cases W06, W12, W19, W20."""
    version = dense("get", "weight_version")
    answer = dense("generate", make_prompt(), [1, 2])
    tensors = tensors_of(models["dense2"])
    fault(tensors)
    with pytest.raises(UsageError) as error:
        send(dense, 9, tensors)
    assert "nothing was changed" in str(error.value)
    for message in messages:
        assert message in str(error.value)
    assert dense("get", "weight_version") == version
    for a, b in zip(answer, dense("generate", make_prompt(), [1, 2]), strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert (a.rollout_log_probs == b.rollout_log_probs).all()


def test_a_missing_or_short_file_is_refused(dense: Engine, tmp_path) -> None:
    rows = [(spec, 64 * i) for i, spec in enumerate(dense("weight_specs"))]
    with pytest.raises(UsageError, match="does not exist"):
        dense("update_weights", 9, str(tmp_path / "none"), rows, "full")
    (tmp_path / "short").write_bytes(bytes(100))
    with pytest.raises(UsageError, match="has 100 bytes, the tensors end at"):
        dense("update_weights", 9, str(tmp_path / "short"), rows, "full")
    assert len(dense("generate", make_prompt(), [1])) == 1


def test_other_bytes_than_announced_stop_the_engine_until_the_next_sync(dense: Engine, models) -> None:
    """Case W07: gate and up rows joined in the wrong order have the right shape; only their digests tell."""
    right = tensors_of(models["dense"])
    wrong = dict(right)
    both = torch.stack([right[fused("gate")], right[fused("up")]], 1).flatten(0, 1)
    wrong[fused("gate")], wrong[fused("up")] = both.chunk(2)
    _, received, held = send(dense, 2, wrong, expected=right)
    names = {d.name for d in compare(checkpoint_manifest(models["dense"]), held)}
    assert (
        names
        == {fused("gate"), fused("up")}
        == {d.name for d in compare(checkpoint_manifest(models["dense"]), received)}
    )
    with pytest.raises(VimeError, match=r"engine \d+ holds no complete weights: version 2 is not what was sent: value"):
        dense("generate", make_prompt(), [1])
    with pytest.raises(VimeError, match="holds no complete weights"):
        dense("resume")
    send(dense, 3, right)
    assert dense("generate", make_prompt(), [1])[0].weight_version_min == 3


def test_weights_change_while_answers_are_under_way(dense: Engine, models) -> None:
    """Case R21: the answers go on, every token of the new version is the new policy's, and the mixture is marked."""
    send(dense, 10, tensors_of(models["dense"]))
    options = {"ignore_stop": True, "max_response_len": 120}
    mixed, version = [], 10
    for attempt in range(6):  # how far the answers are when the update comes is a matter of load
        running = dense.submit("generate", make_prompt(), range(32), options)
        time.sleep(0.1 * 2**attempt)
        version += 1
        send(dense, version, tensors_of(models["dense2" if version % 2 else "dense"]))
        samples = running.result(100)
        mixed = [s for s in samples if s.weight_version_min != s.weight_version_max]
        if mixed:
            break
    assert mixed
    assert {(s.weight_version_min, s.weight_version_max) for s in mixed} == {(version - 1, version)}
    for sample in mixed[:8]:
        assert np.isfinite(sample.rollout_log_probs).all()
        scored = dense("score", sample.token_ids)
        off = np.abs(scored - sample.rollout_log_probs)[sample.prompt_len :] > 1e-4
        assert off.any(), "the first tokens are the old policy's"
        assert not off[-1]
        first_new = int(np.flatnonzero(off)[-1]) + 1
        assert off[:first_new].mean() > 0.9


def test_cached_prefixes_do_not_outlive_an_update(dense: Engine, models) -> None:
    prompt = make_prompt(100)
    send(dense, 20, tensors_of(models["dense"]))
    dense("generate", prompt, [1])
    send(dense, 21, tensors_of(models["dense2"]))
    (sample,) = dense("generate", prompt, [1])
    scored = dense("score", sample.token_ids)
    assert np.abs(scored - sample.rollout_log_probs)[100:].max() <= 1e-5


def test_sleep_level_2_refuses_until_weights_are_synced(dense: Engine, models) -> None:
    """Cases W14, W21."""
    send(dense, 30, tensors_of(models["dense"]))
    scores, held = dense("score", IDS), dense("held")
    dense("sleep", 2)
    with pytest.raises(VimeError, match="it sleeps at level 2"):
        dense("generate", make_prompt(), [1])
    with pytest.raises(VimeError, match="wake it before"):
        send(dense, 31, tensors_of(models["dense"]))
    dense("wake")
    with pytest.raises(VimeError, match="slept at level 2, which drops the weights"):
        dense("generate", make_prompt(), [1])
    dropped = compare(held, dense("held"))
    assert {d.name for d in dropped} == set(held.tensors)  # NaN everywhere: a tensor not sent again would show
    _, _, again = send(dense, 31, tensors_of(models["dense"]))
    assert compare(held, again) == []
    assert (dense("score", IDS) == scores).all()


def test_sleep_level_1_keeps_the_weights(dense: Engine) -> None:
    scores, version = dense("score", IDS), dense("get", "weight_version")
    dense("sleep", 1)
    with pytest.raises(VimeError, match="sleeps already"):
        dense("sleep", 1)
    dense("wake")
    assert dense("get", "weight_version") == version
    assert (dense("score", IDS) == scores).all()
    with pytest.raises(UsageError, match="sleep level = 3"):
        dense("sleep", 3)


def test_a_lost_buffer_is_named_and_ends_the_engine(host, models) -> None:
    """Case W14: the rotary cache is in no checkpoint; a full sync does not bring it back."""
    engine = Engine(host, "buffers", make_config(str(models["dense"])))
    buffer = "model.layers.0.self_attn.rotary_emb.cos_sin_cache"
    engine("rpc", "vime_plant", buffer, 0.0)
    with pytest.raises(VimeError, match=rf"buffers were lost or changed on rank 0: {buffer}"):
        send(engine, 1, tensors_of(models["dense"]))
    with pytest.raises(VimeError, match="holds no complete weights"):
        engine("generate", make_prompt(), [1])
    engine("shutdown")


def test_what_the_engine_holds_is_read_not_remembered(host, models) -> None:
    engine = Engine(host, "planted", make_config(str(models["dense"])))
    engine("rpc", "vime_plant", "model.layers.2.mlp.gate_up_proj.weight", 0.5)
    found = compare(checkpoint_manifest(models["dense"]), engine("held"))
    assert [(d.kind, d.name) for d in found] == [
        ("value", "model.layers.2.mlp.gate_proj.weight"),
        ("value", "model.layers.2.mlp.up_proj.weight"),
    ]
    engine("shutdown")


def test_a_model_that_the_loader_drops_tensors_of_is_refused(host, tmp_path) -> None:
    model = tiny_models.build("qwen3", 0, attention_bias=True)
    path = tiny_models.save(model, tmp_path / "biased")
    with pytest.raises(VimeError, match=r"loader drops 4 tensors .*layers\.0\.self_attn\.o_proj\.bias"):
        Engine(host, "biased", make_config(path))
    host.call("biased", "shutdown")


def test_the_transport_syncs_a_real_engine(dense: Engine, models) -> None:
    tensors = tensors_of(models["dense2"])

    class Proxy:
        name = "engine 0"

        async def weight_specs(self):
            return await asyncio.wrap_future(dense.submit("weight_specs"))

        async def update_weights(self, *args):
            return await asyncio.wrap_future(dense.submit("update_weights", *args))

    def write(plan: WritePlan):
        return write_weights(plan, tensors.items())

    specs = list(checkpoint_manifest(models["dense2"]).tensors.values())
    transport = ShmTransport(write, specs, [Proxy()], "full", 60)
    manifest = transport.sync(40)
    transport.close()
    assert compare(checkpoint_manifest(models["dense2"]), manifest) == []
    assert dense("get", "weight_version") == 40
    assert not [f for f in os.listdir("/dev/shm") if f.startswith(f"vime-run-weights-{os.getpid()}-")]
