"""Alone against together."""

from two_sides import two_sides

from vime.align.checks.batch import CHECK
from vime.types import Verdict


def test_a_batch_invariant_engine_passes_bitwise(net):
    found = CHECK.run(two_sides(net))
    assert found.verdict == Verdict.PASS
    assert "bitwise" in found.measured


def test_a_result_that_depends_on_its_company_fails(net):
    bench = two_sides(net)
    bench.engine.batch_error = 1e-3
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert "what else is in the batch" in found.cause


def test_one_sample_has_no_company(net):
    bench = two_sides(net)
    bench.__dict__["batch"] = bench.batch.select([0])
    assert CHECK.run(bench).verdict == Verdict.NOT_TESTED
