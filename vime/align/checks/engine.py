"""Engine against trainer, token by token: the total. Its terms come before it, and say which of them it is."""

from __future__ import annotations

from typing import Any

import numpy as np

from vime.align.bench import Bench
from vime.align.gap import Compared, compared
from vime.align.walk import Check
from vime.types import CheckResult, Verdict

NAME = "engine"
TERMS = ("sampling", "tokens", "decode", "batch", "prefix_cache", "order", "packing", "shapes", "head", "routing")
"""What the total is made of, each a check of its own, measured by one more pass over the same rollout."""
BEFORE = ("loaded", "names", "weights", "buffers", "determinism")
WORST = 5


def run(bench: Bench) -> CheckResult:
    """Max, p99 and mean, and the worst samples: the mean hides one bad sample of many (case A23)."""
    found = compared(bench)
    if isinstance(found, str):
        return CheckResult(NAME, Verdict.NOT_TESTED, cause=found)
    gap, band = found.gap, found.band
    verdict = band.verdict(gap)
    samples = gap.by_sample()
    measured = f"engine - trainer: {gap}; worst {samples[0]}{found.note}"
    numbers = _numbers(bench, found)
    if verdict == Verdict.PASS:
        return CheckResult(NAME, verdict, measured, band.reason, numbers=numbers)
    bad = [one for one in samples if not one.max <= band.pass_max]
    evidence = (
        f"{len(bad)} of {len(samples)} samples have a token above {band.pass_max:.2g}",
        *map(str, samples[:WORST]),
        *gap.worst_tokens(bench.tokenizer),
    )
    cause, step = _cause(verdict, len(bad), len(samples))
    return CheckResult(NAME, verdict, measured, band.reason, evidence, cause, step, numbers=numbers)


def _cause(verdict: Verdict, num_bad: int, num_samples: int) -> tuple[str, str]:
    if verdict == Verdict.WARN:
        return (
            "rounding of bfloat16: single tokens are off, the means are not",
            "model.dtype = float32 tells rounding from a fault; watch the mean over the steps",
        )
    if 4 * num_bad <= num_samples:
        return (
            f"{num_bad} of {num_samples} samples alone are off: what is special about them, not the weights",
            "look at their ids: long ones, one prompt, samples that were preempted or retried",
        )
    return (
        "the two sides compute otherwise: the failed term among 8a to 8j says which; where none failed, the "
        "model's own computation in one of them",
        "vime align-check RUN.toml --bisect names the first operation that differs",
    )


def _numbers(bench: Bench, found: Compared) -> dict[str, Any]:
    gap = found.gap
    samples = {one.name: {"max": one.max, "mean": one.mean, "bias": one.bias} for one in gap.by_sample()[:64]}
    size = np.abs(gap.difference_K)
    kept = np.sort(np.argsort(-size, kind="stable")[:4096])
    plot = gap.plot("engine against trainer, per token", found.band.pass_max, bench.tokenizer)
    return {
        **gap.numbers(),
        "temperature": found.temperature,
        "samples": samples,
        "differences": gap.difference_K[kept].tolist(),
        "plots": [plot],
    }


CHECK = Check(
    NAME,
    "8",
    "engine and trainer: the same log-prob of every token",
    "the engine's log_probs of the rollout are the trainer's, token by token",
    run,
    explained_by=(*BEFORE, *TERMS),
)
