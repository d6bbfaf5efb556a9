"""The total: its verdict sees one bad sample of many, and its failure goes to the term that explains it."""

import numpy as np
from two_sides import two_sides

from vime.align.answer_faults import damaged
from vime.align.checks import engine, sampling, tokens
from vime.align.checks.engine import CHECK
from vime.align.walk import walk
from vime.types import Verdict


def test_a_clean_pair_passes(net):
    found = CHECK.run(two_sides(net, 0.7))
    assert found.verdict == Verdict.PASS
    assert len(found.numbers["differences"]) == found.numbers["num_tokens"] == 160
    assert found.numbers["plots"][0]["kind"] == "scatter"


def test_one_bad_sample_of_16_is_seen_with_its_id(net):
    """A23"""
    bench = two_sides(net)

    def spoil(batch):
        batch.rollout_log_probs_T[batch.offsets[6] + batch.prompt_lens_N[6] : batch.offsets[7]] += 0.2
        return batch

    bench.damage = spoil
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert "worst sample 1/2" in found.measured
    assert found.evidence[0].startswith("1 of 16 samples have a token above")
    assert "1 of 16 samples alone are off" in found.cause


def test_its_failure_follows_from_the_term_that_explains_it(net):
    bench = two_sides(net, top_p=0.8)
    report = walk([sampling.CHECK, tokens.CHECK, engine.CHECK], bench)
    assert [one.verdict for one in report.checks] == [Verdict.FAIL, Verdict.PASS, Verdict.FAIL]
    assert report.checks[2].follows == "sampling"
    assert [one.name for one in report.findings] == ["sampling"]
    bench = two_sides(net)
    bench.damage = lambda batch: damaged(batch, "exchanged-log-probs")[0]
    assert [one.name for one in walk([sampling.CHECK, tokens.CHECK, engine.CHECK], bench).findings] == ["tokens"]


def test_what_no_term_explains_is_its_own_finding(net):
    bench = two_sides(net)
    rng = np.random.default_rng(0)
    bench.trainer.spoil = lambda values, *_: values + rng.normal(0, 0.1, len(values)).astype(np.float32)
    report = walk([sampling.CHECK, tokens.CHECK, engine.CHECK], bench)
    assert [one.name for one in report.findings] == ["engine"]
    assert "--bisect" in report.findings[0].next_step


def test_bfloat16_rounding_is_a_warning(net):
    bench = two_sides(net, dtype="bfloat16")
    rng = np.random.default_rng(0)
    bench.trainer.spoil = lambda values, *_: values + rng.normal(0, 0.03, len(values)).astype(np.float32)
    found = CHECK.run(bench)
    assert found.verdict == Verdict.WARN
    assert "rounding of bfloat16" in found.cause
