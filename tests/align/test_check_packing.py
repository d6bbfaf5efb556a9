"""A sample alone, cut short, before and after others (case A13)."""

import numpy as np
import pytest
from two_sides import two_sides

from vime.align.checks.packing import CHECK
from vime.types import Verdict


@pytest.mark.parametrize("dp", [1, 2])
def test_packs_without_leaks_pass(net, dp):
    """A13"""
    found = CHECK.run(two_sides(net, dp=dp))
    assert found.verdict == Verdict.PASS
    assert found.measured.startswith("28 variants of 4 samples")


@pytest.mark.parametrize("dp", [1, 2])
def test_a_leak_from_the_neighbour_before_is_named(net, dp):
    """A13"""
    bench = two_sides(net, dp=dp)
    bench.trainer.spoil = lambda values, before, size: values + np.float32(1e-2 * (before > 0))
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert "depends on its neighbour sample" in found.cause
    assert "packed after sample" in found.evidence[0]


def test_padding_that_counts_is_named(net):
    """A13"""
    bench = two_sides(net)
    bench.trainer.spoil = lambda values, *_: values + np.float32(1e-2 * (len(values) < 12))
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert "log-probs of a prefix depend on what comes after it" in found.cause


def test_bfloat16_rounding_is_a_warning(net):
    bench = two_sides(net, dtype="bfloat16")
    bench.trainer.spoil = lambda values, before, size: values + np.float32(0.1 * (size > 1))
    assert CHECK.run(bench).verdict == Verdict.WARN
    bench.trainer.spoil = lambda values, before, size: values + np.float32(0.6 * (size > 1))
    assert CHECK.run(bench).verdict == Verdict.FAIL


def test_one_sample_is_packed_with_itself(net):
    """A rollout of one answer: a leak from the neighbour before shows all the same."""
    bench = two_sides(net)
    bench.batch = bench.batch.select([0])
    found = CHECK.run(bench)
    assert found.verdict == Verdict.PASS
    assert found.measured.startswith("3 variants of 1 samples")
    bench.trainer.spoil = lambda values, before, size: values + np.float32(1e-2 * (before > 0))
    assert CHECK.run(bench).verdict == Verdict.FAIL


def test_what_bfloat16_rounds_is_not_called_a_leak():
    from vime.align.checks.packing import Variant, _cause

    found = [Variant("sample 0/0", "prefix of 4 tokens alone", 0.12)]
    assert "rounding" in _cause(found, 0.05, Verdict.WARN)[0]
    assert "not causal" in _cause(found, 0.05, Verdict.FAIL)[0]
