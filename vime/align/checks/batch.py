"""Does it matter to the engine which requests go together? The same sequences alone and all at once."""

from __future__ import annotations

from vime.align.bench import Bench
from vime.align.gap import few_rows, whole_sequences
from vime.align.generation import scores_differ
from vime.align.walk import Check
from vime.types import CheckResult, Verdict

NAME = "batch"
SAMPLES = 32


def run(bench: Bench) -> CheckResult:
    """Measured on a CPU, tiny models: 0 in both types; up to 3.3e-6 in float32 with other kernels than vLLM's."""
    rows = few_rows(bench.batch, SAMPLES)
    if len(rows) < 2:
        return CheckResult(NAME, Verdict.NOT_TESTED, cause="fewer than two samples: nothing to put together")
    sequences = whole_sequences(bench.batch, rows)
    alone = bench.engine.score(sequences, 1)
    together = bench.engine.score(sequences)
    return scores_differ(
        bench, NAME, rows, (alone, together), ("alone", "together"),
        "the engine's result of a sequence depends on what else is in the batch: a kernel that is not batch-invariant",
        "vllm.max_num_seqs lower, or VLLM_BATCH_INVARIANT=1 where the device has such kernels",
    )  # fmt: skip


CHECK = Check(
    NAME,
    "8d",
    "the engine: alone as among others",
    "a sequence has the same log-probs alone and among others",
    run,
    is_live=True,
)
