"""Check 3: what engines received and hold against the trainer's tensors (cases W12, W18, W19, W20)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from fake_bench import FakeBench, config, manifest, synced
from safetensors.torch import save_file

from vime.align.checks.weights import run
from vime.errors import UsageError
from vime.types import Verdict, WeightManifest
from vime.weights.manifest import build_manifest

Q0 = "model.layers.0.self_attn.q_proj.weight"


def with_wrong(origin: str) -> WeightManifest:
    entry = manifest(origin).tensors[Q0]
    return manifest(origin, {Q0: replace(entry, digest="other")})


def test_equal_on_both_ends_passes_and_says_that_the_checkpoint_is_the_same() -> None:
    result = run(synced())
    assert result.verdict == Verdict.PASS
    assert result.measured == "engine 0 received: 47 of 47 tensors; engine 0 holds: 47 of 47 tensors"
    assert result.evidence == ("trainer, engine and checkpoint hold the same bits",)


def test_a_probe_answers_for_what_is_not_read_back() -> None:
    result = run(synced(held=None))
    assert result.verdict == Verdict.PASS
    assert result.measured.startswith("engine 0 received: 47 of 47 tensors; the rest by a probe forward of")
    assert result.evidence[1].startswith("what engine 0 holds is not read back")


def test_a_tensor_that_cannot_be_read_back_is_answered_by_a_probe_that_can_fail() -> None:
    held = manifest("engine-held", {Q0: replace(manifest("engine-held").tensors[Q0], digest="")})
    result = run(synced(held=held))
    assert result.verdict == Verdict.PASS
    assert "engine 0 holds: 46 of 47 tensors; the rest by a probe forward" in result.measured
    assert result.evidence[1] == f"no digests of 1 tensors that are held and cannot be read back, first {Q0}"
    wrong = synced(held=held)
    wrong.engine.scored = -0.1
    found = run(wrong)
    assert (found.verdict, "computes otherwise" in found.cause) == (Verdict.FAIL, True)


def test_engines_that_say_nothing_are_not_tested() -> None:
    bench = synced()
    bench.engine.sides = {}
    assert run(bench).verdict == Verdict.NOT_TESTED


def test_a_tensor_that_changed_on_the_way_and_one_that_is_stored_wrongly() -> None:
    received = run(synced(received=with_wrong("engine-received"), held=with_wrong("engine-held")))
    assert received.verdict == Verdict.FAIL
    assert received.measured == "engine 0 received: 46 of 47 tensors; engine 0 holds: 46 of 47 tensors"
    assert "between the trainer's export and the engine's loader" in received.cause
    held = run(synced(held=with_wrong("engine-held")))
    assert held.verdict == Verdict.FAIL
    assert held.evidence[0].startswith(f"engine 0 holds: value: {Q0}")
    assert "put them elsewhere" in held.cause


def test_a_refused_sync_is_the_finding_and_says_what_the_engine_is_left_with() -> None:
    """Cases W19, W20: nothing was touched, so the walk goes on."""
    bench = FakeBench(refusal=UsageError("not the same weights (1 difference), nothing was sent:\nmissing: x", "look"))
    result = run(bench)
    assert result.verdict == Verdict.FAIL
    assert result.measured.startswith("the weight sync was refused: not the same weights")
    assert result.evidence[0] == "missing: x"
    assert "its own load of model.path" in result.evidence[-1]
    bench.engine.held = with_wrong("engine-held")
    assert "1 differences from the checkpoint" in run(bench).evidence[-1]


def test_weights_that_passed_through_bfloat16_are_recognised(tmp_path: Path) -> None:
    """Case W12: float32 again at the end, each value rounded."""
    torch.manual_seed(0)
    tensors = {f"t{i}": torch.randn(4, 4) for i in range(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    sent = build_manifest(0, "trainer", tensors.items())
    rounded = build_manifest(0, "engine-received", ((n, t.bfloat16().float()) for n, t in tensors.items()))
    bench = synced(received=rounded, held=rounded)
    bench.config, bench.checkpoint = config(model={"path": str(tmp_path)}), replace(sent, origin="checkpoint")
    bench.trainer.exported = sent
    result = run(bench)
    assert result.verdict == Verdict.FAIL
    assert result.cause.startswith("3 tensors passed through bfloat16")
    bench.engine.sides = {
        "engine 0": (replace(sent, tensors=sent.tensors | {"t1": replace(sent.tensors["t1"], digest="x")}), None)
    }
    assert "bfloat16" not in run(bench).cause
