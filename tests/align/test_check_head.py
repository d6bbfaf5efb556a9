"""An fp32 head on one side is an error with its effect (case A08)."""

from two_sides import DTYPES, two_sides

from vime.align.checks.head import CHECK
from vime.types import Verdict


def test_equal_types_pass_and_are_said(net):
    found = CHECK.run(two_sides(net))
    assert found.verdict == Verdict.PASS
    assert "head float32" in found.measured


def test_a_one_sided_head_fails_with_the_size_of_its_effect(net):
    """A08"""
    bench = two_sides(net, dtype="bfloat16")
    low = {**DTYPES, "dtype": "bfloat16", "head_dtype": "bfloat16", "logits_dtype": "bfloat16"}
    bench.trainer.dtypes = low
    bench.engine.dtypes = {**low, "head_dtype": "float32", "logits_dtype": "float32"}
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert "head, logits: float32 in the engine, bfloat16 in the trainer" in found.cause
    assert found.evidence[1].startswith("effect of a bfloat16 head alone: max 0.0")
