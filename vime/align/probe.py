"""A probe forward: what an engine holds and cannot be read back is known by what it computes with it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vime.align.bench import Bench, Forward
from vime.align.gap import Band, Gap
from vime.types import RolloutBatch, Sample, Verdict

LENGTH = 64
STRIDE = 7919
"""A prime: the tokens of the probe are spread over the vocabulary, and none comes twice in a small one."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Engine 0 against the trainer, both with weights that should be equal, over one fixed sequence."""

    verdict: Verdict
    text: str


def probed(bench: Bench) -> Probe:
    """Log-probs of the probe at temperature 1: a fresh forward of the engine, and one of the trainer."""
    batch = _sequence(bench.spec.vocab_size, min(LENGTH, int(bench.engine.describe()["max_model_len"])))
    theirs_T = bench.engine.score([batch.token_ids_T])[0]
    ours_T = bench.trainer.log_probs(batch, how=Forward(temperature=1.0))
    gap, band = Gap.of(batch, theirs_T, ours_T), Band.of_bench(bench, 1.0)
    return Probe(
        band.verdict(gap), f"probe forward of {batch.num_tokens} tokens, engine - trainer: {gap} ({band.reason})"
    )


def _sequence(vocab_size: int, length: int) -> RolloutBatch:
    token_ids = (1 + STRIDE * np.arange(length, dtype=np.int64)) % vocab_size
    mask = np.arange(length) > 0
    return RolloutBatch.from_samples(0, [Sample(0, 0, token_ids, 1, mask, np.zeros(length, np.float32))])
