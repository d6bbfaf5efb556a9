"""Gaps by hand-computed numbers; bands that pass what was measured on healthy models."""

import numpy as np
import pytest

from vime.align.gap import Band, Gap, few_rows, largest, rise
from vime.types import RolloutBatch, Sample, Verdict


def batch(*lengths, prompt=2):
    samples = []
    for i, n in enumerate(lengths):
        mask = np.arange(n) >= prompt
        samples.append(Sample(i, 0, np.arange(n), prompt, mask, np.where(mask, -1.0, 0.0)))
    return RolloutBatch.from_samples(0, samples)


class Letters:
    def decode(self, ids):
        return "".join(chr(97 + i % 26) for i in ids)


def gap(found, **at):
    theirs = found.rollout_log_probs_T.copy()
    for place, size in at.items():
        theirs[int(place[1:])] -= np.float32(size)
    return Gap.of(found, found.rollout_log_probs_T, theirs)


def test_numbers_by_hand():
    found = gap(batch(4, 4), t2=0.5, t7=0.25)  # tokens 2 and 3 of the first, 6 and 7 of the second are sampled
    assert (found.max, found.mean, found.bias, found.num_tokens) == (0.5, 0.1875, 0.1875, 4)
    assert found.p99 == pytest.approx(0.25 + 0.97 * 0.25)
    assert [(one.name, one.max, one.mean) for one in found.by_sample()] == [
        ("sample 0/0", 0.5, 0.25),
        ("sample 1/0", 0.25, 0.125),
    ]


def test_tokens_off_the_mask_do_not_count():
    assert gap(batch(4), t0=3.0, t1=3.0).max == 0.0


def test_the_worst_token_is_shown_with_its_text():
    assert gap(batch(4, 4), t7=0.25).worst_tokens(Letters()) == (
        "sample 1/0 position 3 token 3 'd' after 'abc': engine -1, trainer -1.25",
    )
    assert gap(batch(4)).worst_tokens(Letters()) == ()


def test_float32_has_one_limit_that_follows_depth_and_temperature():
    assert Band.of("float32", 4).fail_max == 1e-5
    assert Band.of("float32", 30).fail_max == pytest.approx(1.4e-4)
    assert Band.of("float32", 4, 0.5).fail_max == 2e-5
    assert Band.of("float32", 4, 2.0).fail_max == Band.of("float32", 4, 0.0).fail_max == 1e-5
    assert Band.of("float32", 4).verdict(gap(batch(4), t3=9e-6)) == Verdict.PASS
    assert Band.of("float32", 4).verdict(gap(batch(4), t3=2e-5)) == Verdict.FAIL


def test_bfloat16_warns_of_single_tokens_and_fails_by_means():
    band = Band.of("bfloat16", 4)
    assert band.verdict(gap(batch(102), t50=0.04)) == Verdict.PASS
    assert band.verdict(gap(batch(102), t50=0.4)) == Verdict.WARN  # as healthy models have
    assert band.verdict(gap(batch(102), **{f"t{t}": 0.16 for t in range(2, 102)})) == Verdict.FAIL
    one_bad = gap(batch(102, 12), **{f"t{t}": 0.6 for t in range(104, 114)})
    assert one_bad.mean < band.fail_mean
    assert band.verdict(one_bad) == Verdict.FAIL


def test_a_sample_of_few_tokens_has_no_mean_of_its_own():
    """The mean of 7 tokens is that of one outlier, as healthy models have; of 8 it is one."""
    few, enough = (gap(batch(102, 2 + n), **{f"t{t}": 0.6 for t in range(104, 104 + n)}) for n in (7, 8))
    assert Band.of("bfloat16", 4).verdict(few) == Verdict.WARN
    assert Band.of("bfloat16", 4).verdict(enough) == Verdict.FAIL


def test_the_largest_difference_is_infinite_where_one_is_no_number():
    assert largest([np.array([1.0]), np.array([2.0])], [np.array([1.5]), np.array([4.0])]) == 2.0
    assert largest([np.array([1.0]), np.array([np.nan])], [np.array([1.5]), np.array([4.0])]) == np.inf
    assert largest([], []) == 0.0


def test_what_is_no_number_fails_and_comes_first():
    found = batch(4, 4)
    theirs = found.rollout_log_probs_T.copy()
    theirs[7] = np.nan
    broken = Gap.of(found, found.rollout_log_probs_T, theirs)
    assert Band.of("bfloat16", 4).verdict(broken) == Verdict.FAIL
    assert broken.by_sample()[0].name == "sample 1/0"
    assert "nan" in broken.worst_tokens(Letters())[0]


def test_a_rise_from_step_to_step():
    """A06: the trend over steps, not only the size."""
    band = Band.of("float32", 4)
    assert rise(gap(batch(4), t2=2e-6), gap(batch(4), t2=3e-6), band) == ""
    assert "went from 1e-06 to 4.5e-06" in rise(gap(batch(4), t2=2e-6), gap(batch(4), t2=9e-6), band)
    assert rise(gap(batch(4), t2=1e-8), gap(batch(4), t2=2e-7), band) == ""  # far below any limit


def test_plots_hold_the_largest_and_say_so():
    drawn = gap(batch(5002), t9=0.5).plot("title", 1e-5, Letters())
    (series,) = drawn["series"]
    assert len(series["y"]) == 4096
    assert max(series["y"]) == pytest.approx(0.5)


def test_few_rows_are_spread():
    assert few_rows(batch(4, 2, 4, 4), 9) == [0, 2, 3]  # the second has no response
    assert few_rows(batch(*[4] * 9), 3) == [0, 4, 8]
