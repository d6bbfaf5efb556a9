"""Check 4: buffers over sleep and wake (cases W14, W21)."""

from __future__ import annotations

import pytest
from fake_bench import FakeBench, FakeEngine, manifest

from vime.align.checks.buffers import run
from vime.errors import UsageError
from vime.types import Verdict

ROTARY = "model.rotary_emb.cos_sin_cache"


def test_both_levels_pass_and_end_with_synced_weights() -> None:
    bench = FakeBench()
    result = run(bench)
    assert (result.verdict, result.numbers["levels"]) == (Verdict.PASS, [1, 2])
    assert bench.engine.has_weights
    assert "refused: engine 0 holds no complete weights" in result.evidence[3]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("wakes", [True, False])
def test_a_lost_buffer_is_named_with_the_time_of_its_loss(level: int, wakes: bool) -> None:
    result = run(FakeBench(engine=FakeEngine(lose={level: [ROTARY]}, wakes=wakes)))
    assert result.verdict == Verdict.FAIL
    assert f"1 buffer changed after sleep level {level} and wake: {ROTARY} (engine 0, rank 0)" in result.measured
    assert ("refuses to wake" in result.measured) is not wakes
    assert result.evidence[0] == "before any sleep: all as at the start"
    assert "W14" in result.cause


def test_a_buffer_that_was_wrong_before_is_not_blamed_on_sleep() -> None:
    result = run(FakeBench(engine=FakeEngine(lost=[ROTARY])))
    assert result.measured == f"1 buffer changed before any sleep: {ROTARY} (engine 0, rank 0)"
    assert "no sleep came between" in result.cause
    assert "sleep" not in result.next_step


def test_an_engine_that_generates_without_weights_fails() -> None:
    result = run(FakeBench(engine=FakeEngine(generates_asleep=True)))
    assert result.verdict == Verdict.FAIL
    assert "with lost weights" in result.measured
    assert "W21" in result.cause


def test_a_sync_that_leaves_tensors_out_would_not_bring_them_back() -> None:
    bench = FakeBench()
    one = next(iter(bench.checkpoint.tensors))
    bench.engine.sides = {"engine 0": (manifest("engine-received", {one: None}), None)}
    assert run(bench).numbers["levels"] == [1]


def test_without_a_sync_the_weights_are_not_dropped() -> None:
    bench = FakeBench(refusal=UsageError("not the same weights"))
    result = run(bench)
    assert (result.verdict, result.numbers["levels"], bench.engine.has_weights) == (Verdict.PASS, [1], True)
    assert result.evidence[-1].startswith("level 2 not tried")
