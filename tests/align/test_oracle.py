"""The oracle against the model called by hand, and every reason not to ask it."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import sample

from vime.align import oracle as module
from vime.align.oracle import Oracle, OracleScores, choose
from vime.config.schema import Sampling
from vime.types import RolloutBatch, Status

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.tiny.make_model import make_tiny_model

NEUTRAL = Sampling().model_dump()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("oracle") / "model", steps=0))


@pytest.fixture(scope="module")
def logits(folder):
    """ids -> logits [L, V], one sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def call(ids):
        with torch.inference_mode():
            return model(torch.tensor(ids)[None]).logits[0].double()

    return call


def batch(*samples):
    return RolloutBatch.from_samples(0, list(samples))


def scored(oracle, found):
    scores = oracle.score(found, np.arange(len(found)))
    assert isinstance(scores, OracleScores)
    return scores


RAGGED = (
    sample(11, 0, prompt_len=3, response=(20, 21, 22, 23), log_probs=(-1.0, -2.0, -3.0, -4.0)),
    sample(12, 1, prompt_len=7, response=(30,), log_probs=(-5.0,)),
    sample(13, 2, prompt_len=2, response=(40, 41), log_probs=(-6.0, -7.0)),
)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_scores_are_those_of_the_model_whatever_stands_beside_a_sample(folder, logits, temperature):
    found = batch(*RAGGED)
    scores = scored(Oracle(folder, 8, NEUTRAL | {"temperature": temperature}), found)
    assert sorted(scores.rows) == [0, 1, 2]
    by_engine = dict(zip(scores.engine_R.tolist(), scores.log_probs_R.tolist(), strict=True))
    for one in RAGGED:
        expected = torch.log_softmax(logits(one.token_ids.tolist()) / (temperature or 1.0), -1)
        for t in range(one.prompt_len, len(one.token_ids)):
            value = expected[t - 1, one.token_ids[t]].item()
            assert by_engine[float(one.rollout_log_probs[t])] == pytest.approx(value, abs=2e-6)


def test_gap_and_stop_probability(folder, logits):
    one = RAGGED[2]
    log_probs = torch.log_softmax(logits(one.token_ids.tolist()), -1)
    own = np.array([log_probs[1, 40].item(), log_probs[2, 41].item()])
    shifted = sample(13, 2, prompt_len=2, response=(40, 41), log_probs=own + np.array([0.25, -0.75]))
    scores = scored(Oracle(folder, 8, NEUTRAL, stop_ids=(2, 3)), batch(shifted))
    assert (scores.mean_gap, scores.max_gap) == pytest.approx((0.5, 0.75), abs=1e-5)
    assert scores.log_prob == pytest.approx(own.mean(), abs=1e-5)
    stops = log_probs[1:3, [2, 3]].exp().sum(-1)
    assert scores.stop_probs_R.tolist() == pytest.approx(stops.tolist(), abs=1e-6)
    assert scores.expected_stops == pytest.approx(stops.sum().item(), abs=1e-6)


def test_masked_tokens_and_those_without_a_finite_log_prob_are_left_out(folder):
    tool = sample(11, 0, response=(20, 21, 22), log_probs=(-1.0, 0.0, -3.0))
    tool.loss_mask[3] = False
    bad = sample(12, 0, response=(20, 21), log_probs=(float("nan"), -9.0), status=Status.FAILED)
    scores = scored(Oracle(folder, 8, NEUTRAL), batch(tool, bad))
    assert sorted(scores.engine_R.tolist()) == [-9.0, -3.0, -1.0]


def test_options_that_change_the_distribution_are_not_compared(folder):
    assert Oracle(folder, 8, NEUTRAL).is_comparable
    for change in ({"top_p": 0.9}, {"top_k": 20}, {"repetition_penalty": 1.1}, {"min_response_len": 4}):
        assert not Oracle(folder, 8, NEUTRAL | change).is_comparable


def test_every_reason_not_to_test_is_said(folder, monkeypatch):
    order = np.arange(3)
    found = batch(*RAGGED)
    assert Oracle(folder, 0, NEUTRAL).score(found, order) == "debug.oracle_samples = 0"
    later = batch(*[sample(1, i, weight_version_min=2, weight_version_max=2) for i in range(3)])
    assert Oracle(folder, 8, NEUTRAL).score(later, order) == (
        "the rollout was sampled with weights v2, the checkpoint holds v0"
    )
    nothing = batch(sample(1, 0, response=(5,), log_probs=(float("nan"),), status=Status.FAILED))
    assert "no sampled token has a finite" in Oracle(folder, 8, NEUTRAL).score(nothing, order[:1])
    unknown = batch(sample(1, 0, response=(5,), log_probs=(float("nan"),), status=Status.FAILED), RAGGED[1])
    assert "the 1 samples that it was given have no sampled token" in Oracle(folder, 1, NEUTRAL).score(unknown, order)
    monkeypatch.setattr(module, "FLOPS_PER_CORE", 1.0)
    assert "no sample is short enough" in Oracle(folder, 8, NEUTRAL).score(found, order)
    monkeypatch.setattr(module, "free_memory", lambda: 4_000_000)
    assert "over half of the 0.0 GB that are free" in Oracle(folder, 8, NEUTRAL).score(found, order)
    monkeypatch.undo()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert Oracle(folder, 8, NEUTRAL).score(found, order) == "not installed: torch, transformers"


def test_memory_is_read_off_the_machine():
    assert 1 << 20 < module.free_memory() < 1 << 50


def test_the_worst_samples_and_an_even_spread_each_once():
    order = np.arange(100)[::-1]
    assert choose(order, 4) == [99, 98, 97, 0]
    assert choose(order, 5) == [99, 98, 97, 96, 0]
    assert choose(order, 1) == [99]
    assert choose(order[:3], 8) == [99, 98, 97]
    assert len(set(choose(order, 64))) == 64
    assert choose(order, 0) == []


def test_the_log_probs_of_markers_in_a_prompt(folder, logits):
    asked = Oracle(folder, 8, NEUTRAL)
    scored(asked, batch(*RAGGED))
    prompt = np.array([7, 9, 7, 50, 9], dtype=np.int32)
    expected = torch.log_softmax(logits(prompt.tolist()), -1)
    found = asked.marker_log_probs([prompt], [7])  # the first 7 has nothing before it
    assert found.tolist() == pytest.approx([expected[1, 7].item()], abs=1e-6)
    assert asked.marker_log_probs([prompt], [60]).tolist() == []
