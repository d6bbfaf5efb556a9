"""Does the trainer's forward repeat itself? The same batch twice, bit by bit; else the first module that does not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vime.align.bench import Bench
from vime.align.bisect import Bisection, Side, bisect, worst_sample
from vime.align.gap import Gap
from vime.align.points import operation
from vime.align.walk import Check
from vime.types import CheckResult, Verdict, WeightManifest

NAME = "determinism"
SETTINGS = (
    "megatron.transformer.attention_backend = 'flash'; megatron.transformer.deterministic_mode = true with "
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 in the environment"
)
LIMIT = "bitwise equal: the same kernels over the same numbers"


def run(bench: Bench) -> CheckResult:
    """Log-probs of the policy twice, the same weights and the same micro-batches: nothing that may differ does."""
    batch = bench.batch
    again_T = bench.trainer.log_probs(batch)
    gap = Gap(batch, bench.log_probs_T, again_T, np.ones(batch.num_tokens, bool), names=("once", "again"))
    backend = bench.trainer.describe().get("attention", "unknown")
    if np.array_equal(bench.log_probs_T, again_T):
        measured = f"{batch.num_tokens} tokens twice: every bit equal; attention: {backend}"
        return CheckResult(NAME, Verdict.PASS, measured, LIMIT, numbers=gap.numbers())
    row = worst_sample(np.abs(gap.difference_T), batch.offsets)
    found = _twice(bench, batch.token_ids_T[batch.offsets[row] : batch.offsets[row + 1]])
    count = int((gap.difference_T != 0.0).sum())
    measured = f"{count} of {batch.num_tokens} tokens differ between two forwards, max {gap.max:.2g}; {_place(found)}"
    return CheckResult(
        NAME, Verdict.FAIL, measured, LIMIT, (*_evidence(found, backend), *gap.worst_tokens(bench.tokenizer)),
        "a kernel of the trainer is not deterministic: the order of its sums changes from call to call",
        SETTINGS,
        numbers={**gap.numbers(), "outputs": found.numbers()},
    )  # fmt: skip


def _twice(bench: Bench, token_ids: np.ndarray) -> Bisection:
    """The outputs of one sequence in two forwards, at a tolerance of 0."""

    def outputs(ids: np.ndarray, points: Sequence[str]) -> dict[str, np.ndarray]:
        return dict(bench.trainer.outputs(ids, points))

    def manifest() -> WeightManifest:
        return WeightManifest(0, "trainer", {})

    one, other = Side("once", outputs, manifest), Side("again", outputs, manifest)
    return bisect(one, other, token_ids, bench.spec.num_layers, bench.spec.is_moe, 0.0)


def _place(found: Bisection) -> str:
    if found.first is None:
        return "one sequence alone repeats itself, so it is a matter of the packed micro-batch"
    return f"the first module that differs is {found.first.point} ({operation(found.first.point)})"


def _evidence(found: Bisection, backend: str) -> list[str]:
    lines = [f"attention in effect: {backend}"]
    if found.first is not None:
        lines.append(f"{found.first.point}: relative {found.first.error:.2g} at token {found.first.token}")
    if found.before is not None:
        lines.append(f"{found.before.point} before it repeats itself")
    lines += [f"then {d.point}: relative {d.error:.2g}" for d in found.layers[-2:] if d.error]
    return lines


CHECK = Check(
    NAME,
    "6a",
    "the trainer's forward repeats itself",
    "transformer-engine kernels may not be deterministic; --attention-backend flash",
    run,
)
