"""Two runs of one step, with planted differences: each is found, located, and a clean pair raises none."""

from dataclasses import replace

import numpy as np
import pytest
from fakes import sample

from vime.align.step_compare import (
    Pair,
    compare_records,
    digest_row,
    first_mismatch,
    gradient_row,
    weight_row,
    weights_before_row,
)
from vime.align.step_limits import Limits, limits
from vime.align.tensors import TensorGap, exchanged_shards, ratio, tensor_gap
from vime.record.training import TrainingHeader, TrainingRecord, TrainingStep
from vime.types import RolloutBatch, Verdict

LIMITS = Limits(1e-5, 1e-5, 1e-5, 1e-5, 1e-4, 1e-2, 2.0**-23, "float32 rounding")
SHARES = np.array([0.5, -0.25, 0.125, -0.375])


def batch():
    """Four samples of two prompt and two response tokens."""
    return RolloutBatch.from_samples(3, [sample(g, i, response=(7, 8 + g)) for g in (0, 1) for i in (0, 1)])


def record(**changes):
    rollout = batch()
    log_probs = -np.arange(1, 17, dtype=np.float32)
    fields = {
        "rollout_id": 3,
        "header": TrainingHeader(),
        "offsets": rollout.offsets,
        "log_probs_T": log_probs,
        "ref_log_probs_T": log_probs - 1,
        "advantages_T": np.ones(16, np.float32),
        "sample_losses_N": SHARES,
        "dp_ranks_N": np.array([0, 1, 0, 1], np.int32),
        "steps": [TrainingStep(0.0, 2.0, 1e-3, 8)],
    }
    return TrainingRecord(**{**fields, **changes})


def compared(candidate, reference=None, allowed=LIMITS):
    pair = Pair(batch(), reference or record(), candidate, allowed, lambda token_id: f"<{token_id}>")
    return {row.quantity: row for row in compare_records(pair)}


def moved(at, by):
    values = record().log_probs_T.copy()
    values[at] += by
    return values


def test_equal_records_pass_bitwise():
    rows = compared(record(), allowed=Limits())
    assert {row.verdict for row in rows.values()} == {Verdict.PASS}
    assert rows["log_probs"].measured == "equal, 16 tokens"
    assert rows["log_probs"].limit == "bitwise"
    assert first_mismatch(rows.values()) is None


def test_the_first_token_over_the_limit_is_named_with_its_text_and_rank():
    row = compared(record(log_probs_T=moved([7, 14], [0.5, 2.0])))["log_probs"]
    assert row.verdict == Verdict.FAIL
    assert row.where == "sample 0/1 (dp rank 1), position 3, token 8 '<8>': -8 -> -7.5"
    assert row.measured == "max 2, p99 2, mean 0.31; 2 of 8 tokens over"
    assert row.evidence[0].startswith("sample 1/1 (dp rank 1), position 2, token 7 '<7>'")


def test_rounding_passes_and_the_worst_token_is_shown():
    row = compared(record(log_probs_T=moved(2, 5e-6)))["log_probs"]
    assert row.verdict == Verdict.PASS
    assert row.where.startswith("sample 0/0 (dp rank 0), position 2")
    assert row.numbers["max"] == pytest.approx(5e-6, rel=0.1)


def test_prompt_tokens_count_only_where_equality_is_bitwise():
    candidate = record(log_probs_T=moved(1, 1.0))
    assert compared(candidate)["log_probs"].verdict == Verdict.PASS
    assert compared(candidate, allowed=Limits())["log_probs"].verdict == Verdict.FAIL


def test_a_value_that_is_no_number_is_infinitely_far():
    row = compared(record(log_probs_T=moved(2, np.nan)))["log_probs"]
    assert row.verdict == Verdict.FAIL
    assert row.numbers["max"] == np.inf


def test_without_a_reference_model_there_is_nothing_to_compare():
    without = record(ref_log_probs_T=np.empty(0, np.float32))
    row = compared(without)["ref_log_probs"]
    assert (row.verdict, row.where) == (Verdict.SKIP, "only one has a reference model")
    assert compared(without, without)["ref_log_probs"].where == "neither has a reference model"


def test_a_loss_that_counts_twice_on_one_rank_is_located():
    """The shares cancel to 0, so that only the shares tell how large a loss is."""
    shares = SHARES * np.array([1, 2, 1, 2])
    steps = [TrainingStep(float(shares.sum()), 3.0, 1e-3, 8)]
    rows = compared(record(sample_losses_N=shares, steps=steps))
    assert rows["loss"].verdict == Verdict.FAIL
    assert rows["loss"].where == "sample 0/1 (dp rank 1): share -0.25 -> -0.5"
    assert rows["loss"].evidence == ("dp rank 0: 0 of 2 samples over", "dp rank 1: 2 of 2 samples over, loss x 2")
    assert rows["grad_norm"].verdict == Verdict.FAIL
    assert first_mismatch(rows.values()).quantity == "loss"


def test_errors_of_samples_that_cancel_are_still_seen():
    rows = compared(record(sample_losses_N=SHARES + np.array([0.1, -0.1, 0, 0])))
    assert rows["loss"].verdict == Verdict.FAIL
    assert "2 of 4 samples over" in rows["loss"].measured


def test_a_loss_of_almost_nothing_is_measured_by_its_parts():
    rows = compared(record(steps=[TrainingStep(1e-7, 2.0, 1e-3, 8)]))
    assert rows["loss"].verdict == Verdict.PASS
    assert rows["loss"].numbers["max relative"] == pytest.approx(1e-7 / 1.25)


def test_another_number_of_steps_is_said():
    rows = compared(record(steps=[TrainingStep(0.0, 2.0, 1e-3, 4)] * 2))
    assert rows["loss"].verdict == Verdict.FAIL
    assert rows["loss"].measured == "1 -> 2 optimizer steps"


def test_the_step_that_differs_is_named():
    two = [TrainingStep(0.0, 2.0, 1e-3, 4)] * 2
    other = [two[0], replace(two[1], grad_norm=2.1, lr=2e-3)]
    rows = compared(record(steps=other), record(steps=two))
    assert (rows["grad_norm"].where, rows["lr"].where) == ("step 1", "step 1")
    assert rows["grad_norm"].measured == "2 -> 2.1, relative 0.05"
    assert rows["lr"].limit == "bitwise"


def test_a_step_that_both_skipped_has_nothing_to_compare():
    """A refused step keeps the loss that was refused, which is no number."""
    nan = float("nan")
    skipped = record(sample_losses_N=np.zeros(4), steps=[TrainingStep(nan, nan, 1e-3, 8, is_skipped=True)])
    rows = compared(skipped, skipped)
    assert (rows["loss"].verdict, rows["grad_norm"].verdict) == (Verdict.SKIP, Verdict.SKIP)
    assert rows["lr"].verdict == Verdict.PASS
    two = [TrainingStep(nan, nan, 1e-3, 4, is_skipped=True), TrainingStep(0.5, 2.0, 1e-3, 4)]
    half = record(sample_losses_N=np.array([0.0, 0.0, 1.0, -0.5]), steps=two)
    assert compared(half, half)["loss"].measured == "0.5 -> 0.5, relative 0"
    worse = replace(half, steps=[two[0], TrainingStep(0.5, 3.0, 1e-3, 4)])
    assert compared(worse, half)["grad_norm"].where == "step 1"


@pytest.mark.parametrize("is_reference", [True, False])
def test_a_step_that_one_of_them_skipped_is_a_mismatch(is_reference):
    skipped = record(steps=[TrainingStep(0.0, 2.0, 1e-3, 8, is_skipped=True)])
    rows = compared(record(), skipped) if is_reference else compared(skipped, record())
    assert rows["loss"].verdict == Verdict.FAIL
    assert rows["loss"].measured == f"the {'reference' if is_reference else 'candidate'} alone skipped step 0"


def test_a_loss_that_is_no_number_is_a_mismatch_even_where_both_have_it():
    for loss in (np.nan, np.inf):
        same = record(steps=[TrainingStep(float(loss), 2.0, 1e-3, 8)])
        assert compared(same, same)["loss"].verdict == Verdict.FAIL
    shares = SHARES.copy()
    shares[1] = np.nan
    broken = record(sample_losses_N=shares)
    for pair in ((broken, record()), (record(), broken), (broken, broken)):
        assert compared(*pair)["loss"].verdict == Verdict.FAIL


def test_where_nothing_was_compared_nothing_passes():
    none = record(steps=[])
    rows = compared(none, none)
    assert {rows[name].verdict for name in ("loss", "grad_norm", "lr")} == {Verdict.NOT_TESTED}
    assert weights_before_row(0, [], holders).verdict == Verdict.NOT_TESTED
    assert gradient_row(0, [], LIMITS, holders).verdict == Verdict.NOT_TESTED
    assert weight_row(0, [], LIMITS, holders).verdict == Verdict.NOT_TESTED
    assert digest_row(0, "weights", {}, {}, holders).verdict == Verdict.NOT_TESTED


def holders(name):
    return f"ranks of {name}"


def gap(name, reference, candidate, before=None):
    arrays = [np.array(a, np.float32) for a in (reference, candidate)]
    return tensor_gap(name, *arrays, None if before is None else np.array(before, np.float32))


def test_gaps_by_hand():
    found = gap("w", [3.0, 4.0], [3.0, 5.0], before=[3.0, 2.0])
    assert (found.norm, found.distance, found.max_abs, found.change) == (5.0, 1.0, 1.0, 2.0)
    assert found.relative_l2 == 0.2
    assert found.cosine == pytest.approx(29 / (5 * np.sqrt(34)))
    assert gap("w", [0.0], [0.0]).cosine == 1.0
    assert gap("w", [1.0], [np.nan]).distance == np.inf
    assert (ratio(0, 0), ratio(1, 0), ratio(0, 5), ratio(0, np.inf)) == (0.0, np.inf, 0.0, 0.0)
    assert {ratio(a, b) for a in (1.0, np.inf, np.nan) for b in (np.inf, np.nan)} == {np.inf}
    with pytest.raises(ValueError, match=r"w: \[1\] against \[2\]"):
        gap("w", [1.0], [1.0, 2.0])


def test_pieces_of_a_large_tensor_add_up(monkeypatch):
    monkeypatch.setattr("vime.align.tensors.PIECE", 3)
    a, b = np.arange(10, dtype=np.float32), np.arange(10, dtype=np.float32) + 1
    found = tensor_gap("w", a.reshape(2, 5), b.reshape(2, 5))
    assert found.distance == pytest.approx(np.sqrt(10))
    assert found.norm == pytest.approx(np.linalg.norm(a))


def test_a_wrong_gradient_is_named_with_its_ranks():
    gaps = [gap("a", [1.0, 2.0], [1.0, 2.0]), gap("b", [1.0, 0.0], [0.0, 1.0])]
    row = gradient_row(0, gaps, LIMITS, holders, "; clipped to 1")
    assert row.verdict == Verdict.FAIL
    assert row.where == "b (ranks of b); clipped to 1"
    assert row.numbers["min cosine"] == 0.0
    assert row.measured.endswith("1 of 2 tensors over")
    assert [(found.name, held_by) for found, held_by in row.tensors] == [("b", "ranks of b"), ("a", "ranks of a")]


def test_a_gradient_of_rounding_alone_is_measured_against_the_whole():
    """The gradient of a key bias is 0 in exact arithmetic: its relative error says nothing."""
    gaps = [gap("k.bias", [1e-8], [-1e-8]), gap("w", [1.0], [1.0])]
    assert gradient_row(0, gaps, LIMITS, holders).verdict == Verdict.PASS


def test_updated_weights_are_measured_against_the_step():
    good = gap("w", [1.0, 1.001], [1.0, 1.001001], before=[1.0, 1.0])
    assert weight_row(0, [good], LIMITS, holders).verdict == Verdict.PASS
    bad = gap("w", [1.0, 1.001], [1.0, 0.999], before=[1.0, 1.0])
    row = weight_row(0, [bad], LIMITS, holders)
    assert row.verdict == Verdict.FAIL
    assert row.numbers["max share of the step"] == pytest.approx(2.0, rel=1e-3)


def test_an_update_too_small_for_the_type_is_no_step_to_measure_against():
    """bfloat16 has no number between 1 and 1.0078125: one side stays, the other rounds up."""
    gaps = [gap("norm", [1.0] * 9, [1.0] * 8 + [1.0078125], before=[1.0] * 9)]
    assert weight_row(0, gaps, limits("bfloat16", 4, 0, is_same=False), holders).verdict == Verdict.PASS
    assert weight_row(0, gaps, LIMITS, holders).verdict == Verdict.FAIL


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("limit", [LIMITS, Limits()])
@pytest.mark.parametrize("where", ["reference", "candidate"])
def test_gradients_and_weights_that_are_no_numbers_are_never_within_limits(bad, limit, where):
    values = ([1.0, bad], [1.0, 2.0]) if where == "reference" else ([1.0, 2.0], [1.0, bad])
    gaps = [gap("w", *values, before=[1.0, 1.0]), gap("v", [1.0, 2.0], [1.0, 2.0], before=[1.0, 1.0])]
    row = gradient_row(0, gaps, limit, holders)
    assert (row.verdict, row.numbers["min cosine"]) == (Verdict.FAIL, 0.0)
    assert row.where.startswith("w (ranks of w)")
    assert weight_row(0, gaps, limit, holders).verdict == Verdict.FAIL


def test_weights_that_never_moved_are_over_every_limit():
    frozen = gap("w", [1.0, 2.0], [1.0, 1.0], before=[1.0, 1.0])
    for dtype in ("float32", "bfloat16"):
        assert weight_row(0, [frozen], limits(dtype, 30, 8, is_same=False), holders).verdict == Verdict.FAIL


def test_a_tensor_of_one_side_alone_is_infinitely_far():
    gaps = [gap("v", [1.0], [1.0], before=[0.0]), TensorGap.incomparable("w", "the candidate has none")]
    for row in (weights_before_row(0, gaps, holders), gradient_row(0, gaps, LIMITS, holders)):
        assert row.verdict == Verdict.FAIL
        assert "the candidate has none" in row.evidence[0]
    assert weight_row(0, gaps, LIMITS, holders).where == "w (ranks of w)"


def test_exchanged_shards_are_recognised():
    whole = np.arange(12, dtype=np.float32).reshape(4, 3)
    rows = np.concatenate([whole[2:], whole[:2]])
    assert exchanged_shards(whole, rows, 2) == 0
    assert exchanged_shards(whole.T, rows.T, 2) == 1
    assert exchanged_shards(whole, whole, 2) is None
    assert exchanged_shards(whole, whole + 1, 2) is None
    row = weights_before_row(
        0, [gap("w", [1, 2], [2, 1])], holders, ["w: its 2 shards are exchanged along dimension 0"]
    )
    assert row.where == "w (ranks of w): its 2 shards are exchanged along dimension 0"


def test_digests_name_what_differs():
    row = digest_row(0, "weights", {"a": "1", "b": "2"}, {"a": "1", "b": "3"}, holders)
    assert (row.verdict, row.measured, row.where) == (Verdict.FAIL, "1 of 2 digests equal", "b (ranks of b)")


def test_limits_widen_with_the_type_and_after_the_first_step_but_never_where_all_is_the_same():
    assert limits("float32", 4, 3, is_same=True).is_bitwise
    first, later = limits("float32", 4, 0, is_same=False), limits("float32", 4, 2, is_same=False)
    wide = limits("bfloat16", 4, 0, is_same=False)
    assert first.log_probs == 1e-5
    assert first.log_probs < later.log_probs < wide.log_probs
    assert first.gradients < later.gradients < wide.gradients
    deep = limits("float32", 30, 0, is_same=False)
    assert (first.grad_norm, deep.grad_norm) == (1e-5, pytest.approx(1.4e-4))
    assert (first.gradients, deep.gradients) == (1e-4, pytest.approx(1.4e-3))
    assert first.ref_log_probs == later.ref_log_probs == 1e-5
    assert first.reason != later.reason
