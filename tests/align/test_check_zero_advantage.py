"""Without advantages there is no gradient; nothing moves, and nothing else is in it."""

from dataclasses import replace

import numpy as np
import pytest
from stepped import stepped

from vime.align.checks.zero_advantage import CHECK, SMALLEST
from vime.errors import CheckFailed
from vime.types import Verdict


def test_the_smallest_advantage_is_no_zero_and_gives_no_gradient():
    assert SMALLEST > 0
    assert SMALLEST / np.float32(2) == 0


def test_a_clean_trainer_skips_one_and_computes_the_other(tmp_path):
    bench = stepped(tmp_path)
    found = CHECK.run(bench)
    assert found.verdict == Verdict.PASS
    assert found.measured == (
        "every advantage 0: grad_norm 0 (skipped, nothing computed); one advantage of 1e-45: grad_norm 0 (computed); "
        "weights of the skipped step bitwise unchanged"
    )
    first, second = bench.trainer.steps
    assert not first.advantages_T.any()
    assert np.count_nonzero(second.advantages_T) == 1
    np.testing.assert_array_equal(first.old_log_probs_T, first.ref_log_probs_T)


def test_a_step_that_is_computed_is_taken_once(tmp_path):
    bench = stepped(tmp_path, algo={"kl_coef": 0.1})
    bench.trainer.skips = False
    assert CHECK.run(bench).verdict == Verdict.PASS
    assert len(bench.trainer.steps) == 1


def test_something_else_in_the_gradient(tmp_path):
    bench = stepped(tmp_path)
    bench.trainer.grad_norm = 1e-12
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert "grad_norm 1e-12 (computed)" in found.measured


def test_weights_that_move_in_a_skipped_step(tmp_path):
    bench = stepped(tmp_path)
    bench.trainer.moves = True
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert found.measured == "2 of 2 tensors changed in a step that was skipped"
    assert found.evidence == ("model.embed_tokens.weight", "model.norm.weight")


@pytest.mark.parametrize("algo", [{"entropy_coef": 0.1}, {"kl_coef": 0.1, "kl_estimator": "k1"}])
def test_other_signals_are_skipped_with_the_reason(tmp_path, algo):
    """A17"""
    found = CHECK.run(stepped(tmp_path, algo=algo))
    assert found.verdict == Verdict.SKIP
    assert "algo." in found.cause


def test_a_trainer_that_refuses_its_data(tmp_path):
    bench = stepped(tmp_path)

    def step(data):
        raise CheckFailed("sample 0/1 (0 of 5 tokens)")

    bench.trainer.step = step
    assert CHECK.run(bench).verdict == Verdict.NOT_TESTED


def test_no_trained_token(tmp_path):
    bench = stepped(tmp_path)
    data = bench.first.data
    bench.change_first(data=replace(data, loss_weight_T=np.zeros_like(data.loss_weight_T)))
    assert CHECK.run(bench).verdict == Verdict.NOT_TESTED
