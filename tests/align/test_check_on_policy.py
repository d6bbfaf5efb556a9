"""The on-policy step: what must be exactly 1 and 0, and what does not hold under which settings (case A17)."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from stepped import METRICS, stepped

from vime.align.checks.on_policy import CHECK, SMALL
from vime.types import StepStats, Verdict


def stats(norm=2.0, **metrics):
    return StepStats(0.0, norm, 1e-6, 20, 0.1, {**METRICS, **metrics})


def test_a_clean_step(tmp_path):
    found = CHECK.run(stepped(tmp_path))
    assert found.verdict == Verdict.PASS
    assert found.measured == "ratio 1 at every token; kl 0 at every token; grad_norm 2"


def test_one_token_of_another_forward_is_off_on_either_side(tmp_path):
    bench = stepped(tmp_path)
    again_T = bench.first.log_probs_T.copy()
    again_T[[2, 3]] += np.float32([1e-3, -1e-3])  # the mean difference is 0
    bench.change_first(again_T=again_T)
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert "ratio of another forward: 2 of 20 tokens differ, ratios from 0.999" in found.measured
    assert any("sample 0/0 position 2" in line for line in found.evidence)
    assert "attention_backend" in found.next_step


def test_the_step_itself_is_off_while_its_signed_mean_is_not(tmp_path):
    bench = stepped(tmp_path)
    bench.change_first(stats=stats(**{"train/ppo_kl_abs": 1e-7}))
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert "ratio of the step itself: mean |log ratio| 1e-07" in found.measured


@pytest.mark.parametrize("where", ["another forward", "the step itself"])
def test_a_ratio_that_is_no_number_is_not_1(tmp_path, where):
    bench = stepped(tmp_path)
    if where == "another forward":
        again_T = bench.first.log_probs_T.copy()
        again_T[3] = np.nan
        bench.change_first(again_T=again_T)
    else:
        bench.change_first(stats=stats(**{"train/ppo_kl_abs": np.nan}))
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert found.numbers[f"ratio of {where}"] == np.inf


def test_kl_to_the_reference(tmp_path):
    bench = stepped(tmp_path)
    bench.change_first(ref_log_probs_T=bench.first.log_probs_T - np.float32(0.1) * bench.first.batch.loss_mask_T)
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert "kl of another forward: 20 of 20 tokens differ" in found.measured


def test_experts_have_a_cause_of_their_own(tmp_path):
    bench = stepped(tmp_path)
    bench.spec = SimpleNamespace(num_layers=4, num_experts=8)
    bench.change_first(stats=stats(**{"train/ppo_kl_abs": 1e-3}))
    assert "moe_permute_fusion" in CHECK.run(bench).next_step


@pytest.mark.parametrize(
    ("norm", "verdict"), [(SMALL, Verdict.PASS), (2 * SMALL, Verdict.WARN), (0.0, Verdict.FAIL), (np.inf, Verdict.FAIL)]
)
def test_the_band_of_the_gradient(tmp_path, norm, verdict):
    bench = stepped(tmp_path)
    bench.change_first(stats=stats(norm))
    found = CHECK.run(bench)
    assert found.verdict == verdict
    assert found.explained_by == (("loaded",) if verdict == Verdict.FAIL else None)


def test_what_does_not_hold_is_said_and_not_asked(tmp_path):
    """A17"""
    bench = stepped(tmp_path, train={"num_steps_per_rollout": 2})
    bench.change_first(stats=stats(**{"train/ppo_kl_abs": 1e-4}), again_T=bench.first.log_probs_T)
    found = CHECK.run(bench)
    assert found.verdict == Verdict.PASS
    assert found.measured == "kl 0 at every token; grad_norm 2"
    assert any(line.startswith("not asked: ratio: train.num_steps_per_rollout = 2") for line in found.evidence)
    bench = stepped(tmp_path / "b", algo={"log_ref": False})
    bench.change_first(ref_log_probs_T=None)
    assert any("not asked: kl: no reference model" in line for line in CHECK.run(bench).evidence)
    bench = stepped(tmp_path / "c", model={"path": "/model", "ref_path": "/other"})
    bench.change_first(ref_log_probs_T=bench.first.log_probs_T - 1)
    found = CHECK.run(bench)
    assert found.verdict == Verdict.PASS
    assert any("model.ref_path = '/other'" in line for line in found.evidence)


def test_a_step_that_was_not_taken_says_nothing(tmp_path):
    bench = stepped(tmp_path)
    bench.change_first(refused="sample 0/1 (0 of 5 tokens)")
    assert CHECK.run(bench).verdict == Verdict.NOT_TESTED
    bench.change_first(refused="", stats=replace(stats(), is_skipped=True, skip_reason="no token"))
    assert CHECK.run(bench).cause == "the step was skipped: no token"
