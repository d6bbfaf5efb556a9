"""Check 2: the exported tensors against the checkpoint's (cases W01, W05, W06, W22)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_bench import SPEC, FakeBench, FakeTrainer, config, manifest

from vime.align.checks.names import run
from vime.types import TensorEntry, Verdict

CLEAN = manifest("trainer").tensors
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Q0, K0 = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
GATE1, UP1 = "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"


def exported(changes: dict[str, TensorEntry | None], **more) -> FakeBench:
    return FakeBench(trainer=FakeTrainer(exported=manifest("trainer", changes)), **more)


def swapped_layers(one: int, other: int) -> dict[str, TensorEntry | None]:
    """Layer ``one`` has the values of ``other``, and the other way round."""
    found: dict[str, TensorEntry | None] = {}
    for name, entry in CLEAN.items():
        for here, there in ((one, other), (other, one)):
            if f"layers.{here}." in name:
                source = CLEAN[name.replace(f"layers.{here}.", f"layers.{there}.")]
                found[name] = replace(entry, digest=source.digest)
    return found


def test_the_same_tensors_pass_and_say_which_rank_holds_what() -> None:
    result = run(exported({}, config=config(parallel={"pp": 2})))
    assert (result.verdict, result.measured) == (Verdict.PASS, "47 of 47 tensors equal the checkpoint's")
    assert [line.split(":")[0] for line in result.evidence] == ["rank 0 (pp 0, tp 0)", "rank 1 (pp 1, tp 0)"]


def test_permuted_layers_are_named_as_a_missing_stage_offset() -> None:
    result = run(exported(swapped_layers(0, 2)))
    assert result.verdict == Verdict.FAIL
    assert result.evidence[0].startswith("permuted: layer 0: in trainer, layer 0 holds layer 2's tensors")
    assert "offset" in result.cause


@pytest.mark.parametrize(
    ("changes", "said", "cause"),
    [
        ({Q0: None}, f"missing: {Q0}", "leaves tensors out"),
        ({"model.layers.9.x.weight": TensorEntry("model.layers.9.x.weight", (1,), "float32", "d")},
         "unexpected: model.layers.9.x.weight", "has not"),
        ({EMBEDDING: replace(CLEAN[EMBEDDING], shape=(34, 8))},
         f"shape: {EMBEDDING}: [32, 8] in checkpoint, [34, 8] in trainer: 2 rows that pad the vocabulary",
         "another shape"),
        ({Q0: replace(CLEAN[Q0], dtype="bfloat16")}, f"dtype: {Q0}", "another type"),
        ({GATE1: replace(CLEAN[GATE1], digest=CLEAN[UP1].digest), UP1: replace(CLEAN[UP1], digest=CLEAN[GATE1].digest)},
         f"swapped: {GATE1}: holds the values of {UP1}", "each other's name"),
        ({HEAD: replace(CLEAN[HEAD], digest=CLEAN[EMBEDDING].digest)}, f"unexpected: {HEAD}: is {EMBEDDING} once more",
         "has not"),
    ],
)  # fmt: skip
def test_each_kind_of_difference_has_its_words(changes, said: str, cause: str) -> None:
    result = run(exported(changes))
    assert result.verdict == Verdict.FAIL
    assert any(line.startswith(said) for line in result.evidence), result.evidence
    assert cause in result.cause


def test_the_head_of_a_tied_model_is_not_exported() -> None:
    """Case W05: the rule is said, and a head that is written all the same is unexpected."""
    tied = replace(SPEC, is_tied=True)
    without = {"spec": tied, "checkpoint": manifest("checkpoint", spec=tied)}
    clean = run(FakeBench(trainer=FakeTrainer(exported=manifest("trainer", spec=tied)), **without))
    assert clean.verdict == Verdict.PASS
    assert "tied" in clean.measured
    twice = run(FakeBench(trainer=FakeTrainer(exported=manifest("trainer")), **without))
    assert twice.verdict == Verdict.FAIL
    assert twice.evidence[0].startswith(f"unexpected: {HEAD}")


def test_a_head_that_is_the_embedding_in_the_checkpoint_already_is_no_fault() -> None:
    """A model may be untied by its config.json and hold one matrix twice."""
    twice = {HEAD: replace(CLEAN[HEAD], digest=CLEAN[EMBEDDING].digest)}
    assert run(exported(twice, checkpoint=manifest("checkpoint", twice))).verdict == Verdict.PASS
