"""Gradients of the run's layout against those of one process."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from stepped import gradients, manifest, record_of, stepped

from vime.align.checks import gradients as check
from vime.align.checks.gradients import CHECK
from vime.types import Verdict


@pytest.fixture(autouse=True)
def _no_model(monkeypatch):
    """Which ranks hold a tensor is asked of a model; here all do."""
    monkeypatch.setattr(check, "holders_of", lambda spec, config: lambda name: "ranks 0-1")


def with_losses(bench, losses, norm=2.0):
    first = bench.first
    bench.change_first(record=record_of(first.data, first.log_probs_T, losses, norm))
    return CHECK.run(bench)


def test_the_same_gradients(tmp_path):
    found = CHECK.run(stepped(tmp_path))
    assert found.verdict == Verdict.PASS
    assert found.measured.startswith("against one process: equal, 2 tensors; grad_norm 2 -> 2")
    assert found.numbers["plots"][0]["kind"] == "bars"


def test_one_parameter_is_off(tmp_path):
    bench = stepped(tmp_path)
    bench.change_first(gradients=gradients(tmp_path / "off", scale=1.01))
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert "1 of 2 tensors over" in found.measured
    assert any("model.norm.weight (ranks 0-1)" in line for line in found.evidence)
    assert "how gradients are summed over ranks" in found.cause
    assert found.explained_by == ("loaded", "determinism")  # the forward agrees: no sampling, no packing explains it


def test_a_gradient_that_one_side_does_not_have(tmp_path):
    bench = stepped(tmp_path)
    for side in ("the run", "one process"):
        half = tmp_path / side
        half.mkdir()
        save_file({"model.norm.weight": torch.ones(2, 2)}, half / "00000.safetensors")
        bench = stepped(tmp_path / f"{side} lacks one")
        if side == "the run":
            bench.change_first(gradients=half)
        else:
            bench.other = replace(bench.other, gradients=half)
        found = CHECK.run(bench)
        assert found.verdict == Verdict.FAIL
        assert any("model.embed_tokens.weight" in line for line in found.evidence)


def test_log_probs_that_differ_already_may_follow_from_more(tmp_path):
    bench = stepped(tmp_path)
    first = bench.first
    bench.change_first(record=record_of(first.data, first.log_probs_T - np.float32(0.1), grad_norm=3.0))
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert found.explained_by is None


def test_one_process_that_alone_skips_the_step(tmp_path):
    bench = stepped(tmp_path)
    record = bench.other.record
    skipped = replace(record, steps=[replace(record.steps[0], is_skipped=True)])
    bench.other = replace(bench.other, record=skipped, gradients=None)
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert "one process skipped the step that the run took" in found.measured


def test_a_rank_that_counts_twice_is_named(tmp_path):
    found = with_losses(stepped(tmp_path), [0.4, -0.2, -0.4, 0.2])
    assert found.verdict == Verdict.FAIL
    assert found.cause == "the weight of the loss on one rank, or its normaliser (dp rank 1 x 2)"
    assert any("sample 0/1 (dp rank 1)" in line for line in found.evidence)


def test_each_rank_divides_by_its_own_tokens(tmp_path):
    found = with_losses(stepped(tmp_path), [0.4 * 1.1, -0.1 * 0.9, -0.4 * 1.1, 0.1 * 0.9])
    assert found.verdict == Verdict.FAIL
    assert found.cause.startswith("the normaliser: each data-parallel rank divides by its own tokens")
    assert "dp rank 0 x 1.1, dp rank 1 x 0.9" in found.cause


def test_a_sample_that_was_not_trained_on(tmp_path):
    bench = stepped(tmp_path)
    bench.change_first(refused="not trained on as the data says: sample 1/1 of data-parallel rank 1 (0 of 5 tokens)")
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert "sample 1/1 of data-parallel rank 1" in found.measured


def test_other_weights_are_no_ground_for_a_comparison(tmp_path):
    bench = stepped(tmp_path)
    bench.other = replace(bench.other, before=manifest(0, "a0", "other"))
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert found.measured.startswith("1 of 2 weights are not those that one process loads")
    missing = {name: entry for name, entry in bench.first.before.tensors.items() if "norm" not in name}
    bench = stepped(tmp_path / "missing")
    bench.change_first(before=replace(bench.first.before, tensors=missing))
    assert CHECK.run(bench).measured.startswith("1 of 2 weights are not those that one process loads")
    assert found.evidence == ("model.norm.weight (ranks 0-1)",)


def test_shards_alone_leave_the_gradients_untested_and_the_norm_not(tmp_path):
    bench = stepped(tmp_path)
    bench.change_first(gradients=None)
    found = CHECK.run(bench)
    assert found.verdict == Verdict.NOT_TESTED
    assert "grad_norm 2 -> 2" in found.measured
    assert with_losses(bench, [0.4, -0.1, -0.4, 0.1], norm=4.0).verdict == Verdict.FAIL


def test_bfloat16_is_wider_and_no_excuse(tmp_path):
    bench = stepped(tmp_path, "bfloat16")
    bench.change_first(gradients=gradients(tmp_path / "rounded", scale=1.02))
    assert CHECK.run(bench).verdict == Verdict.PASS
    bench.change_first(gradients=gradients(tmp_path / "off", scale=2.0))
    assert CHECK.run(bench).verdict == Verdict.FAIL


def test_a_skipped_step_has_no_gradient(tmp_path):
    bench = stepped(tmp_path)
    bench.change_first(stats=replace(bench.first.stats, is_skipped=True, skip_reason="no token"))
    assert CHECK.run(bench).verdict == Verdict.NOT_TESTED


def test_shares_of_no_common_factor_have_no_cause_by_rank(tmp_path):
    found = with_losses(stepped(tmp_path), [0.4, -0.3, -0.4, 0.1])
    assert found.verdict == Verdict.FAIL
    assert "which samples each data-parallel rank trains on" in found.cause


def certain(bench, log_prob):
    old_T = np.where(bench.first.data.loss_weight_T != 0, np.float32(log_prob), np.float32(0))
    bench.change_first(data=replace(bench.first.data, old_log_probs_T=old_T))
    bench.change_first(gradients=gradients(bench.folder / f"certain{log_prob}", scale=1.003))
    return CHECK.run(bench)


def test_a_model_that_is_certain_has_a_gradient_of_rounding(tmp_path):
    bench = stepped(tmp_path)
    assert certain(bench, -1.0).verdict == Verdict.FAIL
    found = certain(bench, -1e-3)
    assert found.verdict == Verdict.PASS
    assert "x 1e+02, as the model is nearly certain" in found.limit
    found = certain(bench, -1e-7)
    assert found.verdict == Verdict.NOT_TESTED
    assert found.cause.startswith("the model is certain of every token")
