"""Where two generations of one sample part, and what is made of it. Every number is computed by hand."""

import math

import numpy as np
import pytest
from fakes import sample

from vime.rollout.regenerate import (
    Known,
    Regeneration,
    SampleMatch,
    as_dict,
    describe,
    judge,
    match,
    reason_not_to,
    rows,
)
from vime.types import Status, Verdict

LIMIT = 1e-5


def decode(ids):
    return "".join(f"<{i}>" for i in ids)


def matched(recorded, again, log_probs=None, again_log_probs=None, is_greedy=False, **changes):
    a = sample(3, 1, response=recorded, log_probs=log_probs)
    b = sample(3, 1, response=again, log_probs=again_log_probs, **changes)
    return match(7, a, b, decode, is_greedy)


def judged(*matches, known=(), not_tested=None):
    return judge(Regeneration(list(matches), not_tested or {}, list(known)), LIMIT, "float32, 4 layers")


def test_identical_answers():
    found = matched([5, 6, 7], [5, 6, 7])
    assert found == SampleMatch(7, "sample 3/1", 3, 3, 3, 0.0)
    assert found.is_identical
    check = judged(found, matched([], []))
    assert (check.verdict, check.limit) == (Verdict.PASS, "bitwise; other arithmetic at most 1e-05 (float32, 4 layers)")
    assert check.measured == (
        "2 of 2 samples identical, 3 of 3 tokens match (100.00%), max |log-prob difference| 0 before they part"
    )


def test_another_token():
    found = matched([5, 6, 7, 8], [5, 6, 9, 8, 1], [-1, -2, -3, -4], [-1, -2.5, -3.25, -4, -5])
    assert (found.num_recorded, found.num_again, found.num_matching, found.log_prob_gap) == (4, 5, 2, 0.5)
    d = found.departure
    assert (d.kind, d.position, d.recorded_token, d.again_token) == ("token", 2, 7, 9)
    assert (d.recorded_log_prob, d.again_log_prob) == (-3.0, -3.25)
    assert (d.recorded_text, d.again_text) == ("<5><6><7>", "<5><6><9>")
    assert describe(found) == (
        "rollout 7 sample 3/1, response token 2 of 4: recorded '<5><6><7>' (-3), again '<5><6><9>' (-3.25)"
    )
    assert rows([found]) == [("7: sample 3/1", "token at 2 of 4", "'<5><6><7>' (-3)", "'<5><6><9>' (-3.25)")]
    assert as_dict(found)["departure"]["position"] == 2
    assert as_dict(found)["sample"] == "3/1"


def test_an_answer_that_ends_elsewhere():
    found = matched([5, 6], [5, 6, 7])
    assert (found.departure.kind, found.departure.position) == ("length", 2)
    assert found.departure.recorded_token is None
    assert "recorded '<5><6>' (ended), again '<5><6><7>' (-0.5)" in describe(found)
    same = matched([5, 6], [5, 6], status=Status.TRUNCATED)
    assert (same.is_identical, same.departure.kind, same.num_matching) == (False, "length", 2)


def test_the_same_tokens_with_other_log_probs_are_not_identical():
    found = matched([5, 6], [5, 6], [-1.0, -2.0], [-1.0, -2.0000005])
    assert (found.is_identical, found.has_other_tokens, found.departure.kind) == (False, False, "log_prob")
    assert found.departure.position == 1
    check = judged(found)
    assert check.verdict == Verdict.WARN
    assert "0 of 1 samples identical, 2 of 2 tokens match" in check.measured
    assert check.cause.startswith("rounding")


def test_an_engine_that_now_gives_no_number_is_no_rounding():
    """The planted fault: NaN compares with nothing, and must not pass as a small difference."""
    nan = float("nan")
    failed = {"status": Status.FAILED}
    found = matched([5, 6, 7], [5, 6, 7], [-1.0, -2.0, -1.0], [-1.0, nan, nan], **failed)
    assert (found.log_prob_gap, found.departure.kind, found.departure.position) == (math.inf, "log_prob", 1)
    behind = matched([5, 6, 7], [5, 6, 0], [-1.0, -2.0, -1.0], [-1.0, -2.0, nan], **failed)
    assert (behind.num_matching, behind.log_prob_gap) == (2, math.inf)
    long = list(range(10, 210))
    same = [matched(long, long)] * 9
    for one in (found, behind):
        check = judged(*same, one)
        assert check.verdict == Verdict.FAIL
        assert "max |log-prob difference| inf" in check.measured


def test_other_weights():
    check = judged(*[matched([5, 6, 7], [5, 6, 8], [-1.0, -2.0, -1.0], [-1.1, -2.2, -1.0])] * 3)
    assert check.verdict == Verdict.FAIL
    assert "max |log-prob difference| 0.2 before" in check.measured
    assert "other weights" in check.cause
    assert len(check.evidence) == 3


def test_other_seeds():
    """Log-probs agree and answers part within a few tokens: that is no rounding."""
    check = judged(*[matched([5, 6, 7], [5, 8, 9])] * 4)
    assert check.verdict == Verdict.FAIL
    assert "the seeds are not used as they were" in check.cause
    check = judged(*[matched([5, 6, 7], [8, 6, 7])] * 2)
    assert check.verdict == Verdict.FAIL
    assert "nothing matches from the first token on" in check.cause


def test_one_departure_in_many_tokens_is_rounding():
    long = list(range(10, 210))
    many = [matched(long, long)] * 3
    check = judged(*many, matched(long, [*long[:150], 9]))  # 1 of 750 tokens
    assert (check.verdict, check.cause.split(":")[0]) == (Verdict.WARN, "rounding")
    assert "near-tie" not in check.cause
    tie = matched(long, [*long[:150], 9], [-0.5] * 150 + [-0.6931] * 50, [-0.5] * 150 + [-0.6932], is_greedy=True)
    assert tie.is_near_tie
    assert "1 of 1 part at a near-tie" in judged(*many, tie).cause
    apart = matched(long, [*long[:150], 9], [-0.5] * 150 + [-0.1] * 50, [-0.5] * 150 + [-2.3], is_greedy=True)
    assert not apart.is_near_tie


def test_one_departure_in_few_tokens_may_be_rounding():
    """A second one is not."""
    same, other = matched([5, 6, 7], [5, 6, 7]), matched([5, 6, 7], [5, 6, 8])
    assert judged(same, other).verdict == Verdict.WARN
    assert judged(same, other, other).verdict == Verdict.FAIL


def test_what_is_known_to_differ_is_the_cause():
    far = matched([5, 6, 7], [5, 6, 8], [-1.0, -2.0, -1.0], [-1.1, -2.2, -1.0])
    weights = Known("the record's weights are v3", "model.path=hf")
    check = judged(far, known=[weights, Known("vllm is 0.33, recorded 0.32", "install it")])
    assert (check.verdict, check.next_step) == (Verdict.FAIL, "model.path=hf")
    assert check.cause == "the record's weights are v3; vllm is 0.33, recorded 0.32"
    asked = Known("rollout.sampling.temperature = 0.5 (command line), recorded 1.0", "leave it out", is_asked=True)
    assert judged(far, known=[asked]).verdict == Verdict.WARN
    assert judged(matched([5], [5]), known=[weights]).verdict == Verdict.PASS  # they turn out to be the same


def test_what_is_not_one_answer_to_one_prompt_is_not_tested():
    assert reason_not_to(sample(response=(5, 6))) is None
    assert reason_not_to(sample(response=())) is None
    holes = sample(response=(5, 6, 7))
    holes.loss_mask[3] = False
    assert reason_not_to(holes).startswith("several turns")
    assert reason_not_to(sample(response=(5, 6), metadata={"num_turns": 2})).startswith("several turns")
    assert reason_not_to(sample(response=(5, 6), metadata={"num_turns": 1})) is None
    assert reason_not_to(sample(status=Status.ABORTED)) == "status aborted"
    check = judged(not_tested={"several turns": 4, "status aborted": 1})
    assert (check.verdict, check.cause) == (Verdict.NOT_TESTED, "4 samples: several turns; 1 samples: status aborted")
    assert judged().verdict == Verdict.NOT_TESTED


@pytest.mark.parametrize("at", [0, 1, 4])
def test_departures_come_first_by_place(at):
    long = np.arange(10, 15)
    other = long.copy()
    other[at] = 99
    found = Regeneration([matched(long, long), matched(long, [*long[:4], 98]), matched(long, other)], {})
    first = found.departures[0]
    assert first.num_matching == min(at, 4)
    assert (found.num_identical, found.num_tokens, found.num_matching) == (1, 15, 5 + 4 + at)
    assert found.match_share == (9 + at) / 15
