"""Check 1: every parameter of every rank against the files."""

from __future__ import annotations

import pytest
from fake_bench import FakeBench, FakeTrainer, parameters

from vime.align.checks.loaded import run
from vime.types import Verdict


def bench(**changes) -> FakeBench:
    return FakeBench(trainer=FakeTrainer(found=parameters(**changes)))


def test_everything_loaded_passes_with_the_accounting() -> None:
    result = run(bench())
    assert (result.verdict, result.measured) == (Verdict.PASS, "6 parameters of the policy equal the files on 2 ranks")
    assert result.evidence == ("policy: none: 3 of 3 tensors loaded, 0 missing, 0 unexpected",)


@pytest.mark.parametrize(
    ("digest", "said", "cause"),
    [
        ("initial decoder.layers.0.mlp.linear_fc2.weight/1", "still holds its initial value", "never loaded"),
        ("decoder.layers.0.mlp.linear_fc2.weight/0", "holds what belongs to decoder.layers.0.mlp.linear_fc2.weight of "
         "rank 0", "placed otherwise"),
        ("something", "digest something, the files give decoder.laye", "changed"),
    ],
)  # fmt: skip
def test_a_wrong_parameter_is_named_with_its_rank(digest: str, said: str, cause: str) -> None:
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    initial = f"initial {name}/1"
    result = run(bench(digest=digest, initial=initial))
    assert result.verdict == Verdict.FAIL
    assert result.evidence[0] == f"policy, rank 1: {name} (from hf {name}): {said}"
    assert cause in result.cause
    assert result.numbers["wrong"] == 1


def test_a_parameter_that_starts_as_the_files_have_it_is_loaded() -> None:
    """Norm weights start as ones, and ones they may be in the files."""
    name = "decoder.layers.0.mlp.linear_fc2.weight/1"
    assert run(bench(initial=name)).verdict == Verdict.PASS


def test_a_wrong_reference_is_told_as_such() -> None:
    result = run(bench(digest="x", of="ref"))
    assert result.verdict == Verdict.FAIL
    assert "ref_path" in result.next_step
    assert result.evidence[0].startswith("reference, rank 1")


def test_no_parameter_is_no_pass() -> None:
    assert run(FakeBench(trainer=FakeTrainer(found=[]))).verdict == Verdict.NOT_TESTED
