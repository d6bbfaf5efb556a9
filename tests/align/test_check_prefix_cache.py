"""A sync empties the prefix cache, and cached prompts change nothing (cases A15 and A21)."""

import pytest
from two_sides import two_sides

from vime.align.checks.prefix_cache import CHECK
from vime.types import Verdict


def test_a_sync_that_resets_passes(net):
    """A15"""
    found = CHECK.run(two_sides(net))
    assert found.verdict == Verdict.PASS
    assert found.measured.startswith("32 of 33 prompt tokens cached, 0 after a sync")


def test_a_stale_cache_is_named_with_its_tokens(net):
    """A15"""
    bench = two_sides(net)
    bench.engine.stays_stale = True
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert "stale prefix cache" in found.cause
    assert found.numbers["num_stale"] == 32


def test_a_cache_that_changes_log_probs_fails(net):
    """A21"""
    bench = two_sides(net)
    bench.engine.cache_error = 1e-3
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert found.numbers["computed against cached"] == pytest.approx(1e-3, rel=0.01)
    assert "the prefix cache changes log-probs" in found.cause


def test_scores_that_read_the_cache_fail(net):
    """A21"""
    bench = two_sides(net)
    scores = bench.engine.score
    bench.engine.score = lambda sequences: [s + (1e-3 if bench.engine.cache else 0.0) for s in scores(sequences)]
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    assert "scored with a full against an empty cache" in found.cause


def test_without_a_cache_or_room_for_two_blocks(net):
    bench = two_sides(net)
    bench.engine.caching = False
    assert CHECK.run(bench).verdict == Verdict.SKIP
    bench = two_sides(net)
    about = bench.engine.describe()
    bench.engine.describe = lambda: {**about, "max_model_len": 32}
    assert "room for a prompt of 24" in CHECK.run(bench).cause


def test_a_cache_that_is_never_hit_is_not_tested(net):
    bench = two_sides(net)
    bench.engine._look_up = lambda ids: False
    assert CHECK.run(bench).verdict == Verdict.NOT_TESTED


def test_rounding_of_bfloat16_is_a_warning_with_a_next_step(net):
    bench = two_sides(net, dtype="bfloat16")
    bench.engine.cache_error = 0.1
    found = CHECK.run(bench)
    assert found.verdict == Verdict.WARN
    assert found.cause.startswith("rounding, or a cache that changes log-probs")
    assert "enable_prefix_caching = false" in found.next_step


@pytest.mark.parametrize("damage", ["part", "nan"])
def test_an_answer_from_the_cache_that_shares_nothing_or_is_no_number(net, damage):
    """A15: keys of other weights may change the very first token; the second of three answers is the cached one."""
    bench = two_sides(net)
    sample_of, calls = bench.engine._sample, []

    def wrong(*args):
        found = sample_of(*args)
        calls.append(1)
        if len(calls) == 3 and damage == "nan":  # the one after the sync
            found.rollout_log_probs[found.prompt_len] = float("nan")
        elif len(calls) == 2 and damage == "part":
            found.token_ids[found.prompt_len] = (found.token_ids[found.prompt_len] + 1) % 20
        return found

    bench.batch  # noqa: B018
    bench.engine._sample = wrong
    found = CHECK.run(bench)
    assert found.verdict == Verdict.FAIL
    if damage == "part":
        assert found.numbers["computed against cached"] == 0.0
