"""Two orders of the same requests (case A21)."""

import numpy as np
from fakes import sample
from two_sides import two_sides

from vime.align.checks.order import CHECK
from vime.align.generation import gap_until_they_part, same_until
from vime.types import Verdict


def test_order_does_not_matter(net):
    found = CHECK.run(two_sides(net))
    assert found.verdict == Verdict.PASS
    assert "16 of 16 samples identical" in found.measured


def test_an_engine_whose_scores_depend_on_the_order(net):
    """A21"""
    bench = two_sides(net)
    bench.engine.order_error = 1e-3
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert "depends on those before it" in found.cause


def test_an_engine_whose_samples_alone_depend_on_the_order(net):
    """A21"""
    bench = two_sides(net)
    scores = bench.engine.score
    bench.engine.order_error = 1e-3

    def score(sequences, at_once=None):
        bench.engine.order_error = 0.0
        return scores(sequences, at_once)

    bench.engine.score = score
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert "samples depends on the order" in found.cause


def test_samples_that_part_at_their_first_token_are_held_against_their_scores(net):
    """A21: nothing is shared that could be compared."""
    bench = two_sides(net)
    bench.batch  # noqa: B018
    generate, calls = bench.engine.generate, []

    def wrong(prompts, seeds, sampling=None):
        calls.append(1)
        found = generate(prompts, seeds, sampling)
        for (answer,) in found if len(calls) == 2 else []:
            answer.token_ids[answer.prompt_len] = (answer.token_ids[answer.prompt_len] + 1) % 20
        return found

    bench.engine.generate = wrong
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert "0 of 16 samples identical" in found.measured


def test_samples_are_compared_until_they_part():
    """What follows other tokens is of another distribution."""
    one = sample(0, response=(5, 6, 7), log_probs=[-1.0, -2.0, -3.0])
    other = sample(0, response=(5, 9, 7), log_probs=[-1.25, -9.0, -9.0])
    assert same_until(one, other) == one.prompt_len + 1
    assert gap_until_they_part(one, other) == 0.25
    longer = sample(0, response=(5, 6, 7, 8), log_probs=[-1.0, -2.5, -3.0, -9.0])
    assert same_until(one, longer) == len(one.token_ids)
    assert gap_until_they_part(one, longer) == 0.5
    longer.rollout_log_probs[one.prompt_len] = np.nan
    assert gap_until_they_part(one, longer) == np.inf
