"""The second rollout: from the updated weights, and from nothing older (cases A06, A15, W21)."""

from dataclasses import replace

import pytest
from stepped import learned, manifest, rollout, stepped

from vime.align.checks.second import CHECK
from vime.types import StepStats, Verdict


def with_gap(bench, gap, **changes):
    batch, own_T = rollout(1, 1, gap)
    bench.change_second(batch=batch, log_probs_T=own_T, **changes)
    return CHECK.run(bench)


def test_a_clean_update(tmp_path):
    found = CHECK.run(stepped(tmp_path))
    assert found.verdict == Verdict.PASS
    assert found.measured.startswith("v1: engine holds 2 of 2 of the trainer's tensors; engine - trainer max 1")
    assert "the first step changed 2 of 2 tensors" in found.evidence


def test_a_stale_engine_is_told_by_its_digests(tmp_path):
    found = with_gap(stepped(tmp_path), 0.2, held=manifest(1, "a0", "b0"), rescored=(0.2, 0.2))
    assert found.verdict == Verdict.FAIL
    assert found.measured.startswith("engine holds 0 of 2 of the trainer's tensors after the sync")
    assert found.cause.startswith("stale engine")
    assert any("2 of them as before the update" in line for line in found.evidence)


def test_a_stale_engine_is_found_though_its_log_probs_are_within_the_limit(tmp_path):
    """A small learning rate moves little: only the digests tell."""
    found = with_gap(stepped(tmp_path), 1e-7, held=manifest(1, "a1", "b0"))
    assert found.verdict == Verdict.FAIL
    assert "model.norm.weight" in found.evidence[1]


def test_half_an_update_is_not_called_stale(tmp_path):
    found = with_gap(stepped(tmp_path), 0.2, held=manifest(1, "a0", "other"))
    assert found.cause == "the update was carried in part, or changed on its way"


def test_a_stale_prefix_cache_is_told_by_cached_tokens_and_a_fresh_forward(tmp_path):
    """A15"""
    found = with_gap(stepped(tmp_path), 0.24, cached=(384, 256), rescored=(0.24, 2e-7))
    assert found.verdict == Verdict.FAIL
    assert found.cause.startswith("stale prefix cache: 256 prompt tokens were read from keys and values of the old")
    assert any("prefix cache: 256 of 384" in line for line in found.evidence)


def test_an_engine_that_computes_otherwise(tmp_path):
    found = with_gap(stepped(tmp_path), 0.24, cached=(384, 256), rescored=(0.24, 0.23))
    assert found.cause.startswith("the engine holds the trainer's weights and computes otherwise")


def test_samples_of_another_version(tmp_path):
    """W21"""
    bench = stepped(tmp_path)
    batch, own_T = rollout(1, 0)
    bench.change_second(batch=batch, log_probs_T=own_T)
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert found.measured == "second rollout sampled with v0, the trainer is at v1"


def test_a_version_that_does_not_advance_with_the_step(tmp_path):
    """W21: trainer and engine agree on a version, and it is that of before the step."""
    bench = stepped(tmp_path)
    batch, own_T = rollout(1, 0)
    same = replace(bench.second.before, version=0)
    bench.change_second(batch=batch, log_probs_T=own_T, before=same, held=same)
    assert CHECK.run(bench).verdict == Verdict.FAIL


def test_a_gap_without_cached_tokens_is_no_stale_cache(tmp_path):
    found = with_gap(stepped(tmp_path), 0.24, cached=(384, 0), rescored=(0.24, 2e-7))
    assert found.cause.startswith("the engine holds the trainer's weights and computes otherwise")


def test_a_step_that_changed_nothing(tmp_path):
    bench = stepped(tmp_path)
    bench.change_first(after=manifest(1, "a0", "b0"))
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert found.measured == "no weight changed in the first step"


def test_what_did_not_change_is_named(tmp_path):
    bench = stepped(tmp_path)
    bench.change_first(after=manifest(1, "a1", "b0"))
    found = CHECK.run(bench)
    assert found.verdict == Verdict.PASS
    assert "the first step changed 1 of 2 tensors; unchanged: model.norm.weight" in found.evidence


def test_a_rising_gap_is_a_warning(tmp_path):
    """A06"""
    found = with_gap(stepped(tmp_path), 5e-6)
    assert found.verdict == Verdict.WARN
    assert "went from" in found.measured
    assert "(case A06)" in found.cause


def test_a_gap_that_stays_is_none(tmp_path):
    bench = stepped(tmp_path)
    bench.first = learned(bench.config, tmp_path / "first", 0, 0, gap=4e-6)
    assert with_gap(bench, 5e-6).verdict == Verdict.PASS


@pytest.mark.parametrize(("gap", "verdict"), [(1e-3, Verdict.PASS), (0.1, Verdict.WARN), (0.6, Verdict.FAIL)])
def test_bfloat16(tmp_path, gap, verdict):
    bench = stepped(tmp_path, "bfloat16")
    bench.first = learned(bench.config, tmp_path / "first", 0, 0, gap=gap)
    assert with_gap(bench, gap).verdict == verdict


def test_without_an_update_nothing_is_tested(tmp_path):
    bench = stepped(tmp_path)
    nothing = StepStats(0.0, 0.0, 0.0, 0, 0.0, is_skipped=True, skip_reason="refused")
    bench.change_first(stats=nothing, after=bench.first.before)
    at = bench.first.before
    batch, own_T = rollout(1, 0)
    bench.change_second(batch=batch, log_probs_T=own_T, before=at, held=at)
    found = CHECK.run(bench)
    assert found.verdict == Verdict.NOT_TESTED
    assert found.cause.endswith("refused")
    bench.change_first(after=replace(at, version=1))  # as after a step that was skipped by rule: counted, not taken
    assert CHECK.run(bench).verdict == Verdict.NOT_TESTED


def test_certain_facts_follow_from_fewer_checks_than_a_gap(tmp_path):
    """A wrong temperature explains log-probs that are apart, and never tensors that were not sent."""
    stale = with_gap(stepped(tmp_path / "a"), 1e-7, held=manifest(1, "a0", "b0"))
    assert stale.explained_by == ("loaded", "names", "weights", "buffers")
    apart = with_gap(stepped(tmp_path / "b"), 0.2)
    assert apart.verdict == Verdict.FAIL
    assert apart.explained_by is None


def test_engines_that_hold_no_whole_tensors(tmp_path):
    bench = stepped(tmp_path)
    bench.change_second(held=None)
    found = CHECK.run(bench)
    assert found.verdict == Verdict.PASS
    assert "not tested (rollout.engine_tp > 1)" in found.measured


def test_a_tensor_that_cannot_be_read_back_is_neither_equal_nor_wrong(tmp_path):
    bench = stepped(tmp_path)
    bench.change_second(held=manifest(1, "a1", ""))
    found = CHECK.run(bench)
    assert found.verdict == Verdict.PASS
    assert "engine holds 1 of 2 of the trainer's tensors (1 cannot be read back)" in found.measured


def test_no_sampled_token(tmp_path):
    bench = stepped(tmp_path)
    batch = bench.second.batch
    bench.change_second(batch=replace(batch, loss_mask_T=batch.loss_mask_T & False))
    assert CHECK.run(bench).verdict == Verdict.NOT_TESTED


def test_rounding_after_a_first_rollout_that_agreed_to_the_bit_is_no_rise(tmp_path):
    bench = stepped(tmp_path)
    bench.first = learned(bench.config, tmp_path / "first", 0, 0, gap=0.0)
    assert with_gap(bench, 7e-7).verdict == Verdict.PASS
