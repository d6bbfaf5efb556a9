"""Does the engine agree with itself? Log-probs of decoding against a fresh prefill of the same tokens."""

from __future__ import annotations

import numpy as np

from vime.align.bench import Bench
from vime.align.gap import Band, Gap, few_rows, whole_sequences
from vime.align.generation import again, as_batch
from vime.align.walk import Check
from vime.types import CheckResult, Verdict

NAME = "decode"
SAMPLES = 32


def run(bench: Bench) -> CheckResult:
    """New samples at temperature 1 without truncation, since that is what the engine's scores are of.

    Measured on a CPU, tiny models: 0 in both types.
    """
    rows = few_rows(bench.batch, SAMPLES)
    if not rows:
        return CheckResult(NAME, Verdict.NOT_TESTED, cause="no sample with a response in this rollout")
    batch = as_batch(again(bench, rows))
    if not batch.loss_mask_T.any():
        return CheckResult(NAME, Verdict.NOT_TESTED, cause="the engine sampled no token")
    scores_T = np.concatenate(bench.engine.score(whole_sequences(batch, range(len(batch)))))
    gap = Gap.of(batch, batch.rollout_log_probs_T, scores_T, names=("decode", "prefill"))
    band = Band.of_bench(bench, 1.0)
    verdict = band.verdict(gap)
    if verdict == Verdict.PASS:
        return CheckResult(NAME, verdict, f"decode - prefill: {gap}", band.reason, numbers=gap.numbers())
    return CheckResult(
        NAME, verdict, f"decode - prefill: {gap}", band.reason, gap.worst_tokens(bench.tokenizer),
        "the engine's decoding computes otherwise than its prefill: another kernel, or a wrong key/value cache",
        "vllm.enforce_eager = true, another attention backend (vllm.attention_backend), kv_cache_dtype = auto",
        numbers=gap.numbers(),
    )  # fmt: skip


CHECK = Check(
    NAME,
    "8c",
    "the engine: token by token as in one forward",
    "the engine's sampled log-probs are those that it computes for the same tokens in one forward",
    run,
    is_live=True,
    explained_by=("sampling", "tokens", "buffers"),
)
