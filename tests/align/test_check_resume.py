"""A resume: weights on both sides, the version handshake, the reference that stays (cases A16, T21, W21)."""

from dataclasses import replace

from stepped import manifest, rollout, stepped

from vime.align.checks.resume import CHECK
from vime.types import Verdict


def changed(tmp_path, **changes):
    bench = stepped(tmp_path)
    bench.found = replace(bench.found, **changes)
    return CHECK.run(bench)


def test_a_clean_resume(tmp_path):
    found = changed(tmp_path)
    assert found.verdict == Verdict.PASS
    assert found.measured.startswith("2 tensors had moved on, of 2 the trainer has back 2, engine 2; engine - trainer")
    assert "before the sync the engine refused" in found.evidence[0]


def test_an_engine_that_generates_before_the_sync(tmp_path):
    """A16, W21"""
    found = changed(tmp_path, refusal="")
    assert found.verdict == Verdict.FAIL
    assert found.measured == "the engine generated before it had the resumed weights"


def test_an_engine_with_the_weights_of_the_start(tmp_path):
    """A16"""
    batch, own_T = rollout(2, 2, gap=0.3)
    found = changed(tmp_path, held=manifest(2, "a0", "b0"), batch=batch, log_probs_T=own_T)
    assert found.verdict == Verdict.FAIL
    assert "2 of 2 tensors of the engine are not the checkpoint's" in found.measured
    assert "engine - trainer max 0.3" in found.measured
    assert found.explained_by == ("buffers", "loaded", "names", "second", "weights")


def test_log_probs_alone_tell_where_no_worker_holds_whole_tensors(tmp_path):
    """A16"""
    batch, own_T = rollout(2, 2, gap=0.3)
    found = changed(tmp_path, held=None, batch=batch, log_probs_T=own_T)
    assert found.verdict == Verdict.FAIL
    assert "(case A16)" in found.cause
    assert found.explained_by is None


def test_a_reference_that_the_load_moved(tmp_path):
    """T21"""
    own_T = stepped(tmp_path / "own").found.ref_T
    found = changed(tmp_path, ref_after_T=own_T - (own_T < -0.75))
    assert found.verdict == Verdict.FAIL
    assert found.measured == "loading moved the reference: its log-probs differ at 16 of 28 tokens"
    assert found.explained_by == ("determinism", "loaded", "reference")  # no temperature moves a reference
    assert "(case T21)" in found.cause


def test_a_trainer_that_went_on_with_what_it_had(tmp_path):
    found = changed(tmp_path, loaded=manifest(3, "a3", "b2"), held=manifest(3, "a3", "b2"))
    assert found.verdict == Verdict.FAIL
    assert found.measured == "1 of 2 tensors of the trainer are not what was saved"
    assert found.evidence[0] == "model.embed_tokens.weight"


def test_equal_weights_that_compute_otherwise(tmp_path):
    own_T = stepped(tmp_path / "own").found.policy_T
    found = changed(tmp_path, policy_after_T=own_T + 1e-3)
    assert found.verdict == Verdict.FAIL
    assert "though its weights are equal" in found.measured


def test_another_state_of_the_run(tmp_path):
    found = changed(tmp_path, state_after={"n": 2})
    assert found.verdict == Verdict.FAIL
    assert found.measured == "the state of the run is not what was saved"


def test_loading_what_is_there_already_tests_nothing(tmp_path):
    found = changed(tmp_path, moved=manifest(2, "a2", "b2"))
    assert found.verdict == Verdict.NOT_TESTED


def test_a_wide_gap_of_bfloat16_is_a_warning_with_a_next_step(tmp_path):
    bench = stepped(tmp_path, "bfloat16")
    batch, own_T = rollout(2, 2, gap=0.1)
    bench.found = replace(bench.found, batch=batch, log_probs_T=own_T)
    found = CHECK.run(bench)
    assert found.verdict == Verdict.WARN
    assert "float32" in found.next_step


def test_no_sampled_token_after_the_resume(tmp_path):
    batch = stepped(tmp_path / "own").found.batch
    found = changed(tmp_path, batch=replace(batch, loss_mask_T=batch.loss_mask_T & False))
    assert (found.verdict, found.cause) == (Verdict.NOT_TESTED, "no sampled token in the rollout after the resume")
