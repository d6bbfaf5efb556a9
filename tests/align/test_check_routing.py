"""Routing (case A12): experts of two sides by hand; a router biased by 1e-3, near ties, a dense model."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from vime.align.bench import Routing, joined_routing
from vime.align.checks.routing import CHECK
from vime.align.routing import before, differs, first_places, tie_margin, touched
from vime.types import RolloutBatch, Sample, Verdict

LENGTHS, LAYERS, EXPERTS, CHOSEN = (40, 60), (0, 1, 2), 8, 2


def rollout() -> RolloutBatch:
    samples = [Sample(g, 0, np.arange(n) % 9, 4, np.arange(n) >= 4, np.zeros(n)) for g, n in enumerate(LENGTHS)]
    return RolloutBatch.from_samples(0, samples)


def logits_of(seed: int = 0) -> np.ndarray:
    """[T, M, E]"""
    return np.random.default_rng(seed).normal(size=(sum(LENGTHS), len(LAYERS), EXPERTS))


def routed(logits_TME: np.ndarray) -> Routing:
    experts = np.sort(np.argsort(-logits_TME, axis=-1)[..., :CHOSEN], axis=-1).astype(np.int16)
    margins = np.stack([tie_margin(logits_TME[:, m], experts[:, m]) for m in range(len(LAYERS))], 1)
    return Routing(LAYERS, experts, margins)


def bench(trainer: Routing, engine: Routing, gap_T: np.ndarray | float = 0.0, dtype: str = "float32", is_moe=True):
    batch = rollout()
    batch.rollout_log_probs_T = (np.full(batch.num_tokens, -2.0) + gap_T).astype(np.float32)
    return SimpleNamespace(
        batch=batch,
        log_probs_T=np.full(batch.num_tokens, -2.0, np.float32),
        spec=SimpleNamespace(is_moe=is_moe, num_layers=len(LAYERS)),
        config=SimpleNamespace(
            model=SimpleNamespace(dtype=dtype),
            rollout=SimpleNamespace(sampling=SimpleNamespace(temperature=1.0)),
        ),
        trainer=SimpleNamespace(routing=lambda _: trainer),
        engine=SimpleNamespace(routing=lambda _: engine),
    )


def test_a_dense_model_is_skipped():
    result = CHECK.run(bench(None, None, is_moe=False))
    assert result.verdict == Verdict.SKIP


def test_the_same_experts_everywhere():
    result = CHECK.run(bench(routed(logits_of()), routed(logits_of() + 1e-7)))
    assert result.verdict == Verdict.PASS
    assert result.measured == "300 (token, layer) went to the same experts"


def test_a_bias_of_one_thousandth_in_one_layer_is_no_rounding():
    """Some experts are less than 1e-3 apart here, and change places further apart than rounding explains."""
    logits = logits_of(1) * 0.01
    biased = logits.copy()
    biased[:, 1, 3] += 1e-3
    engine, trainer = routed(logits), routed(biased)
    count = int(differs(engine.experts_TMK, trainer.experts_TMK).sum())
    assert 0 < count < 20
    result = CHECK.run(bench(trainer, engine))
    assert result.verdict == Verdict.FAIL
    assert f"{count} of 300 (token, layer)" in result.measured
    assert "a bias or weight" in result.cause
    (bars,) = result.numbers["plots"][0]["series"]
    assert bars["x"] == ("0", "1", "2")
    assert bars["y"] == (0.0, pytest.approx(count / 100), 0.0)


def near_tie() -> tuple[Routing, Routing]:
    """Sample 1, token 20 (50 of all): the second and third expert of layer 0 are 2e-6 apart, either way."""
    logits = logits_of()
    logits[60, 0] = [3, 1, 1 - 2e-6, 0, 0, 0, 0, 0]
    other = logits.copy()
    other[60, 0, 2] = 1 + 2e-6
    other[61, 1] = logits[61, 1][::-1]  # what comes above and after differs because of it, by any margin
    return routed(logits), routed(other)


def test_a_near_tie_that_explains_the_gap_asks_for_replay():
    gap_T = np.where((np.arange(100) > 60), 1e-2, 1e-7)
    result = CHECK.run(bench(*near_tie(), gap_T))
    assert result.verdict == Verdict.WARN
    assert "that explains the difference" in result.cause
    assert "replay" in result.next_step
    assert result.numbers["margin"] < 1e-5
    assert result.numbers["gap_touched"][0] == pytest.approx(1e-2, rel=1e-3)
    assert result.numbers["gap_others"][0] < 1e-6
    assert "sample 1/0 token 20, layer 0: trainer [0, 1], engine [0, 2]" in result.evidence[3]


def test_a_near_tie_with_equal_log_probs_passes():
    assert CHECK.run(bench(*near_tie(), 1e-7)).verdict == Verdict.PASS


def test_a_near_tie_that_does_not_explain_the_gap():
    result = CHECK.run(bench(*near_tie(), 1e-2))
    assert result.verdict == Verdict.WARN
    assert "does not explain" in result.cause


def test_bfloat16_has_wider_ties():
    logits = logits_of(2)
    moved = logits + np.random.default_rng(1).normal(scale=0.01, size=logits.shape)
    trainer, engine = routed(logits), routed(moved)
    assert (trainer.experts_TMK != engine.experts_TMK).any()
    assert CHECK.run(bench(trainer, engine, 1e-3, "bfloat16")).verdict == Verdict.PASS
    assert CHECK.run(bench(trainer, engine, 1e-3, "float32")).verdict == Verdict.FAIL


def test_other_layers_with_experts():
    one = routed(logits_of())
    other = Routing((0, 2, 3), one.experts_TMK)
    assert CHECK.run(bench(one, other)).verdict == Verdict.FAIL


def test_margins_by_hand():
    logits = np.array([[3.0, 1.0, 2.5, 0.0], [0.0, 5.0, 4.0, 4.5]])
    assert tie_margin(logits, np.array([[0, 2], [1, 2]])).tolist() == [1.5, -0.5]
    assert tie_margin(logits[:, :2], np.array([[0, 1], [0, 1]])).tolist() == [np.inf, np.inf]


def test_places_by_hand():
    offsets = np.array([0, 3, 5])
    places = np.array([[0, 0], [0, 1], [1, 1], [0, 0], [0, 1]], bool)
    assert first_places(places, offsets).tolist() == [[0, 0], [0, 0], [1, 0], [0, 0], [0, 1]]
    assert touched(places, offsets).tolist() == [False, False, True, False, False]
    assert before(np.array([1, 0, 1, 1, 0], bool), offsets).tolist() == [False, True, False, False, True]


def test_routing_of_ranks_is_joined():
    batch, whole = rollout(), routed(logits_of())
    rows = [np.array([1]), np.array([0])]
    spans = [slice(40, 100), slice(0, 40)]
    parts = [
        (row, Routing((layer,), whole.experts_TMK[span][:, [m]], whole.margins_TM[span][:, [m]]))
        for row, span in zip(rows, spans, strict=True)
        for m, layer in enumerate(LAYERS)
    ]
    found = joined_routing(batch, parts)
    assert found.layers == LAYERS
    assert np.array_equal(found.experts_TMK, whole.experts_TMK)
    assert np.array_equal(found.margins_TM, whole.margins_TM)


def test_a_margin_that_is_no_number_is_no_tie():
    other = logits_of()
    other[5, 1, routed(other).experts_TMK[5, 1, 0]] = -9.0
    trainer, engine = routed(logits_of()), routed(other)
    trainer.margins_TM[5, 1] = engine.margins_TM[5, 1] = 0.0
    assert CHECK.run(bench(trainer, engine)).verdict == Verdict.PASS  # a tie, where log-probs agree
    engine.margins_TM[5, 1] = np.nan
    assert CHECK.run(bench(trainer, engine)).verdict == Verdict.FAIL
