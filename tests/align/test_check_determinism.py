"""Determinism: a trainer of a few numpy layers, one of which may add noise at every call."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from vime.align.checks.determinism import CHECK
from vime.align.points import all_points
from vime.types import RolloutBatch, Sample, Verdict

LAYERS = 4


def rollout() -> RolloutBatch:
    lengths = (5, 9)
    samples = [
        Sample(g, 0, np.arange(n) + 4, 2, np.arange(n) >= 2, np.zeros(n), text="x") for g, n in enumerate(lengths)
    ]
    return RolloutBatch.from_samples(0, samples)


class Trainer:
    """``noisy``: the point from which on every call is a little different; "pack": log-probs of packs alone are."""

    def __init__(self, noisy: str = "") -> None:
        self.noisy, self.calls = noisy, 0

    def log_probs(self, batch, of="policy", how=None):
        self.calls += 1
        out = np.linspace(-2, -1, batch.num_tokens).astype(np.float32)
        if self.noisy:
            out[7:] += np.float32(1e-6) * self.calls
        return out

    def outputs(self, token_ids, points, of="policy"):
        self.calls += 1
        known = all_points(LAYERS, False)
        first = known.index(self.noisy) if self.noisy in known else len(known)
        return {
            name: np.ones((len(token_ids), 3), np.float32)
            + (np.float32(1e-6) * self.calls if known.index(name) >= first else 0)
            for name in points
        }

    def describe(self):
        return {"attention": "transformer-engine, backend fused"}


def bench(noisy: str = "") -> SimpleNamespace:
    trainer, batch = Trainer(noisy), rollout()
    spec = SimpleNamespace(num_layers=LAYERS, is_moe=False)
    tokenizer = SimpleNamespace(decode=lambda ids: f"<{ids}>")
    return SimpleNamespace(
        batch=batch, log_probs_T=trainer.log_probs(batch), trainer=trainer, spec=spec, tokenizer=tokenizer
    )


def test_two_forwards_that_are_bitwise_the_same():
    result = CHECK.run(bench())
    assert result.verdict == Verdict.PASS
    assert result.measured == "14 tokens twice: every bit equal; attention: transformer-engine, backend fused"


@pytest.mark.parametrize("point", ["embed", "layers.2.attn_out", "layers.3.mlp_out", "final_norm"])
def test_noise_is_found_at_the_module_that_adds_it(point):
    result = CHECK.run(bench(point))
    assert result.verdict == Verdict.FAIL
    assert "7 of 14 tokens differ between two forwards" in result.measured
    assert f"the first module that differs is {point} (" in result.measured
    assert "attention_backend = 'flash'" in result.next_step
    assert "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0" in result.next_step
    assert result.numbers["outputs"]["first"] == point
    assert result.evidence[0] == "attention in effect: transformer-engine, backend fused"


def test_noise_of_packs_alone():
    result = CHECK.run(bench("pack"))
    assert result.verdict == Verdict.FAIL
    assert "one sequence alone repeats itself" in result.measured
