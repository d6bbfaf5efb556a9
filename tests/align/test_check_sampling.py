"""Which setting explains the difference: every hypothesis on a pair that really differs by it."""

import numpy as np
import pytest
from two_sides import two_sides

from vime.align.checks import sampling
from vime.align.checks.sampling import CHECK
from vime.align.gap import Band
from vime.align.hypotheses import Hypothesis
from vime.types import Verdict


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_clean_pair_passes(net, temperature):
    found = CHECK.run(two_sides(net, temperature))
    assert found.verdict == Verdict.PASS
    assert found.numbers["max"] <= 1e-5


def test_temperature_left_out_by_the_trainer(net):
    """A01"""
    bench = two_sides(net, 0.7)
    bench.trainer.ignores_temperature = True
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert "the trainer leaves the temperature of 0.7 out" in found.cause
    bench.is_live = False  # from a record the Hugging Face model says the same
    assert "the trainer leaves the temperature of 0.7 out" in CHECK.run(bench).cause


def test_raw_log_probs_of_the_engine(net):
    """A01"""
    bench = two_sides(net, 0.7)
    bench.engine.reports_raw = True
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert "raw log-probs" in found.cause
    assert "processed_logprobs" in found.next_step


def test_a_record_of_another_temperature(net):
    """A01: sampled at 0.5, trained at 1."""
    bench = two_sides(net, 1.0)
    bench.engine.options["temperature"] = 0.5
    bench.batch  # noqa: B018
    bench.is_live = False
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert "those of temperature 0.5, the trainer's of 1" in found.cause
    assert found.evidence[0].startswith("the rollout was sampled with temperature = 0.5")


def test_a_temperature_that_nobody_names_is_found(net):
    """A01: the record says 1, and it was 0.6."""
    bench = two_sides(net, 1.0)
    bench.engine.options["temperature"] = 0.6
    batch = bench.batch
    batch.header.sampling["temperature"] = 1.0
    bench.is_live = False
    assert "those of temperature 0.6, the trainer's of 1" in CHECK.run(bench).cause


def test_greedy_is_compared_at_temperature_1_and_said(net):
    """A03"""
    bench = two_sides(net, 0.7)
    bench.engine.options["temperature"] = 0.0
    bench.is_live = False
    found = CHECK.run(bench)
    assert found.verdict == Verdict.PASS
    assert "greedy: log-probs of temperature 1" in found.measured


def test_truncation_bias_is_log_s(net):
    """A04"""
    found = CHECK.run(two_sides(net, top_p=0.8))
    assert found.verdict == Verdict.FAIL
    assert "truncation bias" in found.cause
    assert "mean log S = -0." in found.cause
    assert "with top_p = 0.8: max" in found.measured
    assert min(found.numbers["tried"].values()) < 1e-5
    assert "the engine samples with top_p = 0.8" in found.evidence[0]


def test_truncation_is_found_where_nobody_says_it(net):
    """A04: the engine's own description is wrong; what is usual is tried."""
    bench = two_sides(net, top_k=20)
    bench.batch  # noqa: B018
    bench.batch.header.sampling.clear()
    bench.engine.options["top_k"] = 0
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert "with top_k = 20" in found.measured


def test_a_penalty_and_its_origin(net, monkeypatch):
    """R17: generation_config.json"""
    bench = two_sides(net, 0.7, repetition_penalty=1.3)
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert "repetition_penalty = 1.3" in found.cause
    assert "repetition_penalty = 1.3 (from unknown), the run says 1.0" in found.evidence[0]
    monkeypatch.setattr(sampling, "generation_config", lambda bench: {"repetition_penalty": 1.3})
    assert "repetition_penalty = 1.3 (from generation_config.json)" in CHECK.run(bench).evidence[0]


@pytest.mark.parametrize("option", [{"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"min_p": 0.1}])
def test_other_options(net, option):
    ((name, value),) = option.items()
    found = CHECK.run(two_sides(net, **option))
    assert found.verdict == Verdict.FAIL
    assert f"with {name} = {value}" in found.measured


def test_an_option_that_changes_nothing_yet_is_named_all_the_same(net):
    bench = two_sides(net)
    bench.batch  # noqa: B018
    bench.engine.options["top_p"] = 0.9
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert "top_p = 0.9" in found.measured


def test_other_weights_are_not_explained_by_sampling(net):
    bench = two_sides(net, 0.7)
    rng = np.random.default_rng(0)
    bench.trainer.spoil = lambda values, *_: values + rng.normal(0, 0.3, len(values)).astype(np.float32)
    found = CHECK.run(bench)
    assert found.verdict == Verdict.NOT_TESTED
    assert "by something else" in found.cause


def test_bfloat16_rounding_is_no_setting(net):
    bench = two_sides(net, 0.7, dtype="bfloat16")
    rng = np.random.default_rng(0)
    bench.trainer.spoil = lambda values, *_: values + rng.normal(0, 0.03, len(values)).astype(np.float32)
    found = CHECK.run(bench)
    assert found.verdict == Verdict.PASS
    assert "no other setting fits better" in found.measured
    bench = two_sides(net, 0.7, dtype="bfloat16", top_p=0.8)
    bench.trainer.spoil = lambda values, *_: values + rng.normal(0, 0.01, len(values)).astype(np.float32)
    assert "top_p = 0.8" in CHECK.run(bench).cause


def test_weights_of_a_later_step_and_nothing_sampled_are_not_tested(net):
    bench = two_sides(net)
    bench.batch.rows[3]["weight_version_max"] = 2
    assert "weights v2" in CHECK.run(bench).cause
    bench = two_sides(net)
    bench.batch.loss_mask_T[:] = False
    assert CHECK.run(bench).verdict == Verdict.NOT_TESTED


def test_a_live_engine_that_is_greedy_where_the_run_is_not(net):
    """A record may be greedy on purpose; an engine that samples for the run may not."""
    bench = two_sides(net)
    bench.batch  # noqa: B018
    bench.engine.options["temperature"] = 0.0
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert "temperature = 0" in found.measured


@pytest.mark.parametrize(
    ("dtype", "largest", "mean", "explains"),
    [
        ("float32", 1.9e-5, 1e-6, True),
        ("float32", 2.1e-5, 1e-6, False),  # what is left must be rounding, twice the limit of 1e-5
        ("float32", 1e-5, 0.9e-5, False),  # hardly less than before
        ("bfloat16", 0.3, 0.9e-5, False),
        ("bfloat16", 0.3, 0.6e-5, True),  # single tokens are off in any case
    ],
)
def test_what_a_setting_must_leave_to_explain_a_difference(dtype, largest, mean, explains):
    one = Hypothesis("top_p = 0.8", largest, mean, 2e-5, "", "")
    assert one.explains(Band.of(dtype, 4)) is explains
