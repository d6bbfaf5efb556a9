"""Log-probs that stand at the wrong token or in the wrong sample are found, and others are not."""

import numpy as np
import pytest
from two_sides import two_sides

from vime.align.answer_faults import damaged
from vime.align.checks.tokens import CHECK, _place
from vime.align.gap import Band, Compared, Gap
from vime.types import RolloutBatch, Sample, Verdict


def test_a_clean_rollout_passes(net):
    found = CHECK.run(two_sides(net))
    assert found.verdict == Verdict.PASS
    assert found.measured == "shift 0 fits best in 16 of 16 samples"
    assert any("16 of 16 samples are truncated" in line for line in found.evidence)


def test_log_probs_one_token_late(net):
    bench = two_sides(net)
    bench.damage = lambda batch: damaged(batch, "shifted-log-probs")[0]
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert "1 token(s) late" in found.cause
    assert "shift +1" in found.evidence[0]


@pytest.mark.parametrize("shift", [-2, -1, 2])
def test_other_shifts(net, shift):
    bench = two_sides(net)

    def move(batch):
        for row in range(len(batch)):
            own = slice(batch.offsets[row] + batch.prompt_lens_N[row], batch.offsets[row + 1])
            batch.rollout_log_probs_T[own] = np.roll(batch.rollout_log_probs_T[own], shift)
        return batch

    bench.damage = move
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert f"{abs(shift)} token(s) {'late' if shift > 0 else 'early'}" in found.cause


def test_one_sample_with_the_log_probs_of_another(net):
    """A23: one of 16."""
    bench = two_sides(net)
    bench.damage = lambda batch: damaged(batch, "exchanged-log-probs")[0]
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert found.numbers["num_misplaced"] == 1
    assert "samples have the log-probs of others: sample 0/0 fits sample 1/0" in found.cause


def test_bfloat16_finds_what_is_misplaced_and_takes_no_rounding_for_it(net):
    bench = two_sides(net, dtype="bfloat16")
    rng = np.random.default_rng(0)
    bench.trainer.spoil = lambda values, *_: values + rng.normal(0, 0.03, len(values)).astype(np.float32)
    assert CHECK.run(bench).verdict == Verdict.PASS
    bench = two_sides(net, dtype="bfloat16")
    bench.trainer.spoil = lambda values, *_: values + rng.normal(0, 0.01, len(values)).astype(np.float32)
    bench.damage = lambda batch: damaged(batch, "exchanged-log-probs")[0]
    assert "sample 0/0 fits sample 1/0" in CHECK.run(bench).cause


def test_a_short_answer_in_bfloat16_is_not_taken_for_another_that_is_near(net):
    """Two tokens 0.02 off, and those of another sample that are nearer: rounding."""
    bench = two_sides(net, dtype="bfloat16")
    few = [bench.batch.sample(row) for row in (0, 4)]
    for sample, values in zip(few, ([-0.02, -0.02], [-0.5, -0.5]), strict=True):
        end = sample.prompt_len + 2
        sample.token_ids, sample.loss_mask = sample.token_ids[:end], sample.loss_mask[:end]
        sample.rollout_log_probs = np.array([0.0] * sample.prompt_len + values, np.float32)
    bench.__dict__["batch"] = RolloutBatch.from_samples(0, few)
    theirs_T = bench.batch.rollout_log_probs_T.copy()
    own = [slice(int(b) - 2, int(b)) for b in bench.batch.offsets[1:]]
    theirs_T[own[0]], theirs_T[own[1]] = 0.0, -0.0201
    bench.__dict__["log_probs_T"] = theirs_T
    found = CHECK.run(bench)
    assert found.numbers["num_misplaced"] == 0


def test_another_distribution_is_not_a_shift(net):
    bench = two_sides(net, 0.7)
    bench.engine.reports_raw = True
    assert CHECK.run(bench).verdict == Verdict.PASS


def test_noise_as_large_as_the_log_probs_cannot_be_placed(net):
    bench = two_sides(net)
    rng = np.random.default_rng(0)
    bench.trainer.spoil = lambda values, *_: rng.normal(-3, 3, len(values)).astype(np.float32)
    assert CHECK.run(bench).verdict == Verdict.NOT_TESTED


def test_ids_that_another_encoding_would_change_are_said(net):
    bench = two_sides(net)

    class Merging:
        def decode(self, ids):
            return bench_tokenizer.decode(ids)

        def encode(self, text, **_):
            return [0]

    bench_tokenizer = bench.tokenizer
    bench.__dict__["batch"] = bench.batch
    bench.__dict__["tokenizer"] = Merging()
    found = CHECK.run(bench)
    assert found.verdict == Verdict.PASS
    assert "16 of 16 responses would be other ids" in found.evidence[0]


def test_no_number_fits_nowhere(net):
    """Log-probs that are nan stand at no token, their own included."""
    bench = two_sides(net)
    bench.damage = lambda batch: batch.rollout_log_probs_T.fill(np.nan) or batch
    found = CHECK.run(bench)
    assert found.verdict == Verdict.NOT_TESTED
    assert found.measured == "shift 0 fits best in 0 of 16 samples"


def test_answers_of_one_token_are_judged_by_their_gap_alone(net):
    bench = two_sides(net, max_response_len=1)
    assert CHECK.run(bench).verdict == Verdict.PASS
    bench = two_sides(net, max_response_len=1)

    def lower(batch):
        batch.rollout_log_probs_T -= np.float32(1e-2) * batch.loss_mask_T
        return batch

    bench.damage = lower
    assert CHECK.run(bench).verdict == Verdict.NOT_TESTED


def placed(ours, theirs, dtype="float32"):
    """Where the log-probs of one sample of these fit better than in their place."""
    n = len(ours)
    one = Sample(0, 0, np.arange(n + 1), 1, np.arange(n + 1) > 0, np.zeros(n + 1))
    batch = RolloutBatch.from_samples(0, [one])
    padded = [np.array([0.0, *values], np.float64) for values in (ours, theirs)]
    found = Compared(Gap.of(batch, *padded), 1.0, False, Band.of(dtype, 4))
    by_row = [{0: np.array(values, np.float64)} for values in (ours, theirs)]
    return _place(found.gap.by_sample()[0], *by_row, found)


def test_what_fits_elsewhere_fits_to_rounding_and_much_better_than_in_place():
    theirs = [-1.0, -2.0, -4.0, -8.0, -16.0, -32.0]
    late = [0.0, *theirs[:-1]]
    assert placed(late, theirs).place == "shift +1"
    assert placed([v + 1e-3 for v in late], theirs) is None  # better, and no rounding
    flat = [-1.0] * 6
    assert placed([v - 1.9e-5 for v in flat], flat) is None  # rounding, and no better


@pytest.mark.parametrize(("num_tokens", "is_found"), [(5, True), (4, False)])
def test_in_bfloat16_more_tokens_must_agree(num_tokens, is_found):
    theirs = [-1.0, -2.0, -4.0, -8.0, -16.0][:num_tokens]
    assert (placed([0.0, *theirs[:-1]], theirs, "bfloat16") is not None) is is_found
