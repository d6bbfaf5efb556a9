"""Does the order of requests matter to the engine? Two orders of the same requests, sampled and scored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vime.align.bench import Bench
from vime.align.gap import Band, few_rows, whole_sequences
from vime.align.generation import again, gap_to_scores, gap_until_they_part, scores_differ
from vime.align.walk import Check
from vime.types import CheckResult, Sample, Verdict

NAME = "order"
SAMPLES = 32


def run(bench: Bench) -> CheckResult:
    """With the prefix cache on, the second order finds what the first left there (case A21). Measured on a CPU: 0."""
    rows = few_rows(bench.batch, SAMPLES)
    if len(rows) < 2:
        return CheckResult(NAME, Verdict.NOT_TESTED, cause="fewer than two samples: there is one order")
    forth, back = again(bench, rows), again(bench, rows, is_reversed=True)
    sequences = whole_sequences(bench.batch, rows)
    scored = bench.engine.score(sequences), bench.engine.score(sequences[::-1])[::-1]
    cause = "the engine's result of a request depends on those before it"
    step = "vllm.enable_prefix_caching = false tells whether the prefix cache does it"
    found = scores_differ(bench, NAME, rows, scored, ("in order", "reversed"), cause, step)
    if found.verdict == Verdict.FAIL:
        return found
    return _with_samples(bench, found, forth, back)


def _with_samples(bench: Bench, found: CheckResult, forth: Sequence[Sample], back: Sequence[Sample]) -> CheckResult:
    """The same verdict with what became of the samples: equal seeds, so they part only where log-probs differ. Those
    that part are held against the engine's scores of them, for they may do so at their first token.
    """
    band = Band.of_bench(bench, 1.0)
    parted = [each for a, b in zip(forth, back, strict=True) for each in (a, b) if _part(a, b)]
    same = len(forth) - len(parted) // 2
    sizes = [gap_until_they_part(a, b) for a, b in zip(forth, back, strict=True)]
    size = max(*sizes, gap_to_scores(bench, parted))
    measured = f"{found.measured}; {same} of {len(forth)} samples identical, max {size:.2g}"
    numbers = {**found.numbers, "num_identical": same, "max_sampled": size}
    verdict, cause, step = found.verdict, found.cause, found.next_step
    if not size <= band.fail_max:
        verdict, cause = Verdict.FAIL, "what the engine samples depends on the order of the requests"
        step = "vllm.enable_prefix_caching = false tells whether the prefix cache does it"
    return CheckResult(NAME, verdict, measured, found.limit, found.evidence, cause, step, numbers=numbers)


def _part(ours: Sample, theirs: Sample) -> bool:
    return not np.array_equal(ours.token_ids, theirs.token_ids)


CHECK = Check(
    NAME,
    "8f",
    "the engine: in any order of requests",
    "the same requests in another order have the same log-probs",
    run,
    is_live=True,
    explained_by=("weights", "buffers", "batch", "prefix_cache"),
)
