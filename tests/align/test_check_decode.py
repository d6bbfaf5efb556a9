"""Decoding against prefill: clean, and with a decoding that computes otherwise."""

import pytest
from two_sides import two_sides

from vime.align.checks.decode import CHECK
from vime.types import Verdict


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_clean_engine_passes_whatever_the_run_samples_at(net, temperature):
    bench = two_sides(net, temperature, top_p=0.8)
    bench.engine.reports_raw = True  # what ``sampling`` is for is not decode's
    found = CHECK.run(bench)
    assert found.verdict == Verdict.PASS
    assert "decode - prefill" in found.measured


def test_a_decoding_that_is_off_fails_with_its_tokens(net):
    bench = two_sides(net)
    bench.engine.decode_error = 1e-3
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert found.numbers["max"] == pytest.approx(1e-3, rel=0.1)
    assert "decode" in found.evidence[0]


def test_bfloat16_warns_of_what_float32_fails_for(net):
    bench = two_sides(net, dtype="bfloat16")
    bench.engine.decode_error = 0.06
    assert CHECK.run(bench).verdict == Verdict.WARN
    bench.engine.decode_error = 0.3
    assert CHECK.run(bench).verdict == Verdict.FAIL


def test_it_needs_a_live_engine():
    assert CHECK.is_live
