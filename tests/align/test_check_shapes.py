"""The same shape twice is bitwise; another micro-batch within rounding (case A10)."""

import numpy as np
import pytest
from two_sides import two_sides

from vime.align.checks.shapes import CHECK
from vime.types import Verdict


def test_both_numbers_of_a_clean_trainer(net):
    """A10"""
    found = CHECK.run(two_sides(net))
    assert found.verdict == Verdict.PASS
    assert found.numbers["same"] == found.numbers["max"] == 0.0
    assert "instead of 4096" in found.measured


def test_noise_in_the_same_shape_fails(net):
    bench = two_sides(net)
    bench.trainer.noise = 1e-6
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert found.numbers["same"] == pytest.approx(1e-6, rel=0.5)
    assert "not deterministic" in found.cause


@pytest.mark.parametrize(("dtype", "verdict"), [("float32", Verdict.FAIL), ("bfloat16", Verdict.PASS)])
def test_shapes_that_matter_fail_in_float32_and_are_reported_in_bfloat16(net, dtype, verdict):
    """A10"""
    bench = two_sides(net, dtype=dtype)
    bench.trainer.spoil = lambda values, before, size: values + np.float32(0.02 * (size > 8))
    found = CHECK.run(bench)
    assert found.verdict == verdict
    assert found.numbers["same"] == 0.0
    assert found.numbers["max"] == pytest.approx(0.02, rel=0.01)
