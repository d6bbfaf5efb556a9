"""Signals of a rollout, by hand: each moves for the fault it is there for and for nothing else."""

import math

import numpy as np
import pytest
from fakes import sample

from vime.rollout.coherence import MIN_RUN, Vocabulary, compression, measure
from vime.types import RolloutBatch, Status

ENGLISH = {"prompt_text": "What is it?", "text": "It is a small green apple, I think."}


def vocabulary(size=10, known=None):
    is_token_V = np.ones(size, dtype=bool)
    is_token_V[known if known is not None else size :] = False
    return Vocabulary(is_token_V)


def signals(*samples, **options):
    return measure(RolloutBatch.from_samples(0, list(samples)), vocabulary(**options))


def test_a_clean_sample_moves_nothing():
    s = signals(sample(response=(5, 6, 7), log_probs=(-0.5, -1.0, -0.3), **ENGLISH))
    assert s.log_prob == pytest.approx(-0.6)
    assert s.uniformity == pytest.approx(0.6 / math.log(10))
    shares = ("nonfinite_share", "one_token_share", "invalid_share", "undecodable_share", "mixed_scripts_share",
              "truncated_share")  # fmt: skip
    assert [getattr(s, name) for name in shares] == [0.0] * len(shares)
    assert s.repetition == 1.0


def test_log_probs_that_are_not_finite_are_counted_and_left_out_of_the_mean():
    bad = sample(1, response=(5, 6), log_probs=(float("nan"), -3.0), status=Status.FAILED)
    s = signals(sample(0, response=(5, 6), log_probs=(-1.0, -2.0)), bad)
    assert s.is_finite_N.tolist() == [True, False]
    assert s.nonfinite_share == 0.5
    assert s.log_prob_N.tolist() == [-1.5, -3.0]
    assert s.worst_first().tolist() == [1, 0]
    nothing = signals(sample(response=(5,), log_probs=(float("-inf"),), status=Status.FAILED))
    assert math.isnan(nothing.log_prob)


def test_the_mean_weighs_tokens_and_not_samples():
    s = signals(sample(0, response=(5,), log_probs=(-4.0,)), sample(1, response=(5, 6, 7), log_probs=(-0.0,) * 3))
    assert s.log_prob == -1.0


def test_tokens_that_the_policy_did_not_sample_are_not_looked_at():
    mixed = sample(response=(99, 6), log_probs=(0.0, -1.0))
    mixed.loss_mask[2] = False  # a tool's answer
    s = signals(mixed)
    assert (s.invalid_share, s.log_prob, s.num_tokens_N.tolist()) == (0.0, -1.0, [1])


def test_a_uniform_model_has_uniformity_1():
    assert signals(sample(response=(5, 6), log_probs=(-math.log(10),) * 2)).uniformity == pytest.approx(1.0)


def test_runs_of_one_token_end_at_the_sample():
    one = sample(0, response=(7,) * MIN_RUN)
    other = sample(1, response=(7, 7, 3, 3, 3, 7))
    s = signals(one, other)
    assert s.run_N.tolist() == [MIN_RUN, 3]
    assert s.one_token_share == 0.5
    long = sample(0, response=(7,) * MIN_RUN + (1, 2) * MIN_RUN)  # a row of dashes in a longer text
    assert signals(long).one_token_share == 0.0


def test_ids_that_the_tokenizer_does_not_know():
    s = signals(sample(response=(3, 8, 10, 4)), size=10, known=8)
    assert s.num_invalid_N.tolist() == [2]  # a padded row of the embedding, and one outside it
    assert s.invalid_share == 0.5


def test_repetition_is_seen_in_texts_long_enough_to_say():
    assert compression("no " * 10) == 1.0
    assert compression("again and " * 60) > 15
    assert (
        compression("The quick brown fox jumps over a lazy dog. Pack my box with five dozen liquor jugs, then go. ") < 2
    )


def test_undecodable_characters_count_but_at_the_end_of_a_cut_text():
    cut = sample(response=(5, 6), text="smile \ufffd", status=Status.TRUNCATED, prompt_text="a")
    ended = sample(response=(5, 6), text="smile \ufffd", prompt_text="a")
    assert signals(cut).undecodable_share == 0.0
    assert signals(ended).undecodable_share == pytest.approx(1 / 7)


def test_scripts_are_those_that_no_prompt_has():
    def scripts(text, prompt="What is it?"):
        return int(signals(sample(response=(5, 6), text=text, prompt_text=prompt)).num_scripts_N[0])

    assert scripts("It is 4 µm, said Zoë — “é” ½ ②") == 0
    assert scripts("это 是 그") == 3
    assert scripts("日本語のテスト", prompt="中文") == 0
    assert scripts("An answer in English.", prompt="中文") == 1  # one more language is no garble
    assert signals(sample(response=(5, 6), text="это 是", prompt_text="a")).mixed_scripts_share == 1.0


def test_an_empty_rollout_and_an_empty_answer_are_measured():
    assert signals().repetition == 1.0
    s = signals(sample(response=(), text=""))
    assert (s.nonfinite_share, s.one_token_share, s.invalid_share) == (0.0, 0.0, 0.0)
    assert math.isnan(s.log_prob)
