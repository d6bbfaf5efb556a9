"""The verdict: each symptom by its fault, the cause in the guide's order, and nothing for a clean rollout."""

import math
from dataclasses import replace

import numpy as np
import pytest
from fakes import sample

from vime.align.coherence import (
    LIMITS,
    Case,
    Level,
    PromptEvidence,
    cause_of,
    check_of,
    level_of,
    needs_engine_state,
    symptoms,
)
from vime.align.engine_state import EngineState
from vime.align.oracle import OracleScores
from vime.rollout.coherence import Vocabulary, measure
from vime.types import RolloutBatch, Status, Verdict
from vime.weights.manifest import Difference

ANSWER = {"prompt_text": "What is it?", "text": "It is a small green apple, I think."}
BROKEN = PromptEvidence(untrained=("the embedding of <a> is that of <b>",))
UNIFORM = -math.log(10)


def oracle(gap=0.0, log_prob=-0.5, is_comparable=True):
    engine_R = np.full(4, log_prob + gap)
    return OracleScores((0,), engine_R, np.full(4, log_prob), np.zeros(4), is_comparable)


def case(*samples, **changes):
    samples = samples or (sample(response=(5, 6, 7), **ANSWER),)
    signals = measure(RolloutBatch.from_samples(0, list(samples)), Vocabulary(np.arange(10) < 9))
    return Case(signals, **{"temperature": 1.0, "max_response_len": 8, "dtype": "float32", "num_layers": 4,
                            "oracle": oracle(), **changes})  # fmt: skip


def level(*samples, **changes):
    return level_of(symptoms(case(*samples, **changes)))


def nan(group=0):
    return sample(group, response=(0, 0), log_probs=(float("nan"),) * 2, status=Status.FAILED)


def test_a_clean_rollout_has_no_symptom():
    found = case()
    assert symptoms(found) == []
    check = check_of(found, [], None, is_training=False)
    assert (check.verdict, check.measured) == (
        Verdict.PASS,
        "mean |engine - Hugging Face| 0 nats (limit 1e-05)",
    )


@pytest.mark.parametrize(
    ("response", "options", "expected"),
    [
        ((5, 9, 6), {}, Level.GARBLED),  # 9 is a row of padding
        ((5,) * 20, {}, Level.GARBLED),
        ((5, 6), {"log_probs": (UNIFORM,) * 2}, Level.GARBLED),
        ((5, 6), {"log_probs": (0.5 * UNIFORM,) * 2}, Level.SUSPECT),
        ((5, 6), {"log_probs": (0.3 * UNIFORM,) * 2}, Level.PASS),
        ((5, 6), {"text": "again and " * 60}, Level.SUSPECT),
        ((5, 6), {"text": "so \ufffd\ufffd it is"}, Level.SUSPECT),
        ((5, 6), {"text": "это 是 it"}, Level.SUSPECT),
    ],
)
def test_every_signal_is_a_symptom(response, options, expected):
    assert level(sample(response=response, **{**ANSWER, **options})) == expected


def test_one_sample_that_is_not_finite_is_enough():
    assert level(*[sample(g, response=(5, 6), **ANSWER) for g in range(1, 9)], nan()) == Level.GARBLED


def test_a_high_temperature_makes_a_good_model_nearly_uniform():
    spread = sample(response=(5, 6), log_probs=(0.9 * UNIFORM,) * 2, **ANSWER)
    assert level(spread, temperature=1.5) == Level.PASS
    assert level(spread, temperature=0.0) == Level.GARBLED


def test_answers_that_are_cut_say_something_only_at_a_high_limit():
    cut = sample(response=(5, 6), status=Status.TRUNCATED, **ANSWER)
    assert level(cut, max_response_len=48) == Level.PASS
    assert level(cut, max_response_len=LIMITS.long_response) == Level.SUSPECT
    (symptom,) = symptoms(case(cut, max_response_len=LIMITS.long_response))
    assert symptom.text.startswith("no sample of 1 ended within 512 tokens; ")
    assert level(cut, sample(1, response=(5, 6), **ANSWER), max_response_len=LIMITS.long_response) == Level.PASS


@pytest.mark.parametrize(("gap", "expected"), [(9e-6, Level.PASS), (1e-3, Level.SUSPECT), (0.6, Level.GARBLED)])
def test_the_oracle_alone_is_enough_to_suspect_text_that_reads_well(gap, expected):
    assert level(oracle=oracle(gap)) == level(oracle=oracle(-gap)) == expected


def test_the_limit_of_the_gap_knows_precision_and_temperature():
    assert level(oracle=oracle(0.04), dtype="bfloat16") == Level.PASS
    assert level(oracle=oracle(0.2), dtype="bfloat16") == Level.SUSPECT
    assert level(oracle=oracle(1.5e-5), temperature=0.5) == Level.PASS
    assert level(oracle=oracle(3.0, is_comparable=False)) == Level.PASS  # top_p: another distribution, rightly


@pytest.mark.parametrize(
    "evidence",
    [
        PromptEvidence(foreign=("<|im_start|>",)),
        PromptEvidence(absent=("<|im_start|>",)),
        BROKEN,
        PromptEvidence(marker_log_prob=1.1 * UNIFORM),
    ],
)
def test_every_evidence_of_the_prompts_is_a_symptom(evidence):
    assert level(prompts=evidence) == Level.SUSPECT
    assert level(prompts=PromptEvidence(marker_log_prob=0.5 * UNIFORM)) == Level.PASS


PERMUTED = EngineState(4, 2, (Difference("permuted", "layer 0", "holds layer 1's"),))
ONE = EngineState(4, 1, (Difference("value", "model.norm.weight", "digest 1 in a, 2 in b"),))
RIGHT = EngineState(4, 0)


@pytest.mark.parametrize(
    ("changes", "state", "start"),
    [
        ({"oracle": "none"}, EngineState(4, 4, ONE.differences), "load: the engine does not hold the checkpoint: 4 of"),
        ({"oracle": oracle(1.0)}, PERMUTED, "conversion: layers have each other's weights (layer 0): 2 of 4"),
        ({"oracle": oracle(1.0)}, ONE, "conversion: model.norm.weight: 1 of 4 tensors are not"),
        ({"oracle": oracle(1.0)}, replace(RIGHT, lost_buffers=("rope",)), "released buffers: rope is not what it was"),
        ({"oracle": oracle(1.0)}, replace(ONE, lost_buffers=("rope",)), "conversion: "),  # the guide's order
        ({"oracle": oracle(1.0)}, RIGHT, "the engine's computation: its 4 tensors and its buffers are right"),
        (
            {"oracle": "no room"},
            RIGHT,
            "the engine holds the checkpoint's weights; whether it computes",
        ),
        ({"oracle": oracle(1.0)}, EngineState(unknown="theirs"), "not decided between load, conversion, released"),
        ({"oracle": oracle(1.0)}, None, "not decided between load, conversion, released buffers and the model"),
        ({"prompts": PromptEvidence(foreign=("<a>",))}, None, "chat template: the prompts are not what"),
        ({"prompts": BROKEN}, None, "pretrained model: its chat markers were never trained; the engine agrees"),
        (
            {"prompts": BROKEN, "oracle": "none"},
            None,
            "pretrained model: its chat markers were never trained",
        ),
        ({}, None, "pretrained model or chat template: the engine agrees with Hugging Face"),
    ],
)
def test_the_cause_is_the_first_of_the_guides_that_the_evidence_shows(changes, state, start):
    cause, next_step, _ = cause_of(case(**changes), state)
    assert cause.startswith(start)
    assert next_step


def test_a_checkpoint_that_is_random_is_named():
    spread = sample(response=(5, 6), log_probs=(UNIFORM,) * 2, **ANSWER)
    assert cause_of(case(spread), None)[0].startswith("pretrained model: the checkpoint is as good as random")


def test_engines_are_asked_what_they_hold_only_where_that_can_tell_more():
    assert not needs_engine_state(case(), Level.PASS)
    assert not needs_engine_state(case(prompts=BROKEN), Level.SUSPECT)
    assert needs_engine_state(case(oracle=oracle(1.0)), Level.SUSPECT)
    assert needs_engine_state(case(nan()), Level.GARBLED)


def test_garbled_fails_a_rollout_and_warns_in_training():
    found = case(nan())
    bad = symptoms(found)
    assert check_of(found, bad, RIGHT, is_training=False).verdict == Verdict.FAIL
    check = check_of(found, bad, None, is_training=True)
    assert check.verdict == Verdict.WARN
    assert check.measured == "GARBLED: 1 of 1 samples have log-probs that are not finite"
    suspect = case(oracle=oracle(0.1))
    assert check_of(suspect, symptoms(suspect), RIGHT, is_training=False).verdict == Verdict.WARN


def test_a_rollout_without_a_sampled_token_is_not_judged():
    empty = case(sample(response=()))
    assert check_of(empty, symptoms(empty), None, is_training=False).verdict == Verdict.NOT_TESTED


def test_a_gap_that_is_no_number_is_no_agreement():
    """The checkpoint itself holds NaN, and the engine does not."""
    found = case(oracle=oracle(gap=float("nan")))
    assert not found.is_engine_right
    assert level_of(symptoms(found)) == Level.GARBLED
