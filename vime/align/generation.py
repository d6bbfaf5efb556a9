"""Further samples and scores of the live engine, for the checks that compare it with itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vime.align.bench import Bench
from vime.align.gap import Band, Gap, largest
from vime.align.oracle import NEUTRAL
from vime.types import CheckResult, Prompt, RolloutBatch, Sample, Verdict

PLAIN: dict[str, Any] = {"temperature": 1.0, **NEUTRAL}
"""Sampling from softmax(logits), whatever the run samples from: what the engine's scores are of."""


def prompts_of(batch: RolloutBatch, rows: Sequence[int]) -> tuple[list[Prompt], list[list[int]]]:
    """The prompt of each row with its seed, one request a row."""
    samples = [batch.sample(row) for row in rows]
    prompts = [Prompt(i, s.token_ids[: s.prompt_len].copy(), s.prompt_text, s.label) for i, s in enumerate(samples)]
    return prompts, [[s.seed] for s in samples]


def again(bench: Bench, rows: Sequence[int], is_reversed: bool = False) -> list[Sample]:
    """The prompts of ``rows`` once more, plainly sampled, in the order of ``rows`` however they were asked."""
    prompts, seeds = prompts_of(bench.batch, rows)
    order = range(len(rows) - 1, -1, -1) if is_reversed else range(len(rows))
    answers = bench.engine.generate([prompts[i] for i in order], [seeds[i] for i in order], PLAIN)
    found = {i: group[0] for i, group in zip(order, answers, strict=True)}
    return [found[i] for i in range(len(rows))]


def as_batch(samples: Sequence[Sample]) -> RolloutBatch:
    """Samples of one rollout that is no rollout of the run."""
    return RolloutBatch.from_samples(0, samples)


def same_until(ours: Sample, theirs: Sample) -> int:
    """The number of leading tokens that two samples share: after the first other token they cannot be compared."""
    n = min(len(ours.token_ids), len(theirs.token_ids))
    other = np.flatnonzero(ours.token_ids[:n] != theirs.token_ids[:n])
    return int(other[0]) if len(other) else n


def gap_until_they_part(ours: Sample, theirs: Sample) -> float:
    """Largest |difference| of the log-probs of the tokens that two samples share; NaN counts as infinite. Of two that
    part at once it says nothing: see ``gap_to_scores``.
    """
    n = same_until(ours, theirs)
    return largest([ours.rollout_log_probs[:n]], [theirs.rollout_log_probs[:n]])


def gap_to_scores(bench: Bench, samples: Sequence[Sample]) -> float:
    """Largest |difference| of plainly sampled tokens to the engine's fresh scores of them, which read no cache."""
    scores = bench.engine.score([sample.token_ids for sample in samples]) if samples else []
    sampled = [sample.rollout_log_probs[sample.loss_mask] for sample in samples]
    return largest(sampled, [s[sample.loss_mask] for s, sample in zip(scores, samples, strict=True)])


def scores_differ(
    bench: Bench,
    name: str,
    rows: Sequence[int],
    scored: tuple[Sequence[np.ndarray], Sequence[np.ndarray]],
    names: tuple[str, str],
    cause: str,
    next_step: str,
) -> CheckResult:
    """The verdict over two scorings of the rollout's ``rows``: every token but the first of each counts."""
    batch = bench.batch.select(rows)
    is_compared_T = np.ones(batch.num_tokens, bool)
    is_compared_T[batch.offsets[:-1]] = False
    gap = Gap(batch, np.concatenate(scored[0]), np.concatenate(scored[1]), is_compared_T, names)
    band = Band.of_bench(bench, 1.0)
    verdict = band.verdict(gap)
    measured = f"{names[0]} - {names[1]}: {gap}, {_bits(gap)}"
    if verdict == Verdict.PASS:
        return CheckResult(name, verdict, measured, band.reason, numbers=gap.numbers())
    evidence = gap.worst_tokens(bench.tokenizer)
    return CheckResult(name, verdict, measured, band.reason, evidence, cause, next_step, numbers=gap.numbers())


def _bits(gap: Gap) -> str:
    differ = int((gap.difference_K != 0.0).sum())
    return "bitwise" if differ == 0 else f"{differ} tokens differ in bits"
