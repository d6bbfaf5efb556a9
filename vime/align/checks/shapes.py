"""Does the trainer repeat itself? The same shape twice, bit by bit; and another size of micro-batches."""

from __future__ import annotations

import numpy as np

from vime.align.bench import Bench, Forward
from vime.align.gap import Band, Gap
from vime.align.walk import Check
from vime.types import CheckResult, Verdict

NAME = "shapes"


def run(bench: Bench) -> CheckResult:
    """Two numbers (case A10). Measured on a CPU, tiny models: both 0 in float32 and bfloat16. On a GPU the second is
    not in bfloat16: a matrix product may depend on its shape, which is reported and no failure.
    """
    batch = bench.batch
    if not batch.loss_mask_T.any():
        return CheckResult(NAME, Verdict.NOT_TESTED, cause="no trained token in this rollout")
    same = Gap.of(batch, bench.log_probs_T, bench.trainer.log_probs(batch), names=("once", "again"))
    how, text = _other(bench)
    other = Gap.of(batch, bench.log_probs_T, bench.trainer.log_probs(batch, how=how), names=("as the run", text))
    band = Band.of_bench(bench)
    measured = f"same shape twice: max {same.max:.2g}; {text}: max {other.max:.2g}, mean {other.mean:.2g}"
    limit = f"0 for the same shape; else {band.reason}"
    numbers = {"same": same.max, **other.numbers()}
    if same.max != 0.0:
        return CheckResult(
            NAME, Verdict.FAIL, measured, limit, same.worst_tokens(bench.tokenizer),
            "a kernel of the trainer is not deterministic",
            "megatron.transformer.attention_backend = 'flash'; megatron.transformer.deterministic_mode = true",
            numbers=numbers,
        )  # fmt: skip
    verdict = band.verdict(other)
    if verdict == Verdict.FAIL:
        return CheckResult(
            NAME, verdict, measured, limit, other.worst_tokens(bench.tokenizer),
            "the trainer's log-probs depend on which samples share a micro-batch",
            "train.max_tokens_per_micro_batch as it is in every pass, so that ratios compare equal shapes",
            numbers=numbers,
        )  # fmt: skip
    return CheckResult(NAME, Verdict.PASS, measured, limit, numbers=numbers)


def _other(bench: Bench) -> tuple[Forward, str]:
    """Another size of micro-batches, in which the samples do go together otherwise."""
    lengths_N, own = bench.batch.lengths_N, bench.config.train.max_tokens_per_micro_batch
    if own < int(lengths_N.sum()) and own <= 2 * int(lengths_N.max()):
        size = int(4 * lengths_N.max())
    else:
        size = int(max(lengths_N.max(), min(own, lengths_N.sum()) // 4))
    if size == own:
        size = int(np.iinfo(np.int32).max)
    return Forward(max_tokens_per_micro_batch=size), f"micro-batches of {size} tokens instead of {own}"


CHECK = Check(
    NAME,
    "8h",
    "the trainer: in micro-batches of any size",
    "log-probs are bitwise the same in the same shape, and within rounding in another",
    run,
    explained_by=("determinism", "packing"),
)
