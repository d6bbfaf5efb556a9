"""Is a sample alone in the trainer, whatever it is packed with? A prefix alone, after neighbours, padded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vime.align.bench import Bench, Forward
from vime.align.gap import Band, name_of
from vime.align.walk import Check
from vime.types import CheckResult, RolloutBatch, Sample, Verdict

NAME = "packing"
SAMPLES = 4
ALONE = Forward(max_tokens_per_micro_batch=1)
LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to give a sample to the trainer. gap: largest |difference| to the sample alone, nats."""

    name: str
    text: str
    gap: float
    neighbour: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.text}: max {self.gap:.2g}"


def run(bench: Bench) -> CheckResult:
    """Measured on a CPU, tiny models: up to 1e-6 in float32, 0 in bfloat16."""
    batch = bench.batch
    rows = _rows(batch)
    if not rows:
        return CheckResult(NAME, Verdict.NOT_TESTED, cause="no sample has two tokens")
    alone = dict(zip(rows, _log_probs(bench, batch, rows, ALONE), strict=True))
    found = [*_prefixes(bench, batch, rows, alone), *_neighbours(bench, batch, rows, alone)]
    band = Band.of_bench(bench)
    worst = max(found, key=lambda one: one.gap)
    measured = f"{len(found)} variants of {len(rows)} samples against the sample alone: max {worst.gap:.2g}"
    numbers = {"max": worst.gap, "variants": {str(one).rpartition(": max")[0]: one.gap for one in found}}
    if worst.gap <= band.pass_max:
        return CheckResult(NAME, Verdict.PASS, measured, band.reason, numbers=numbers)
    evidence = tuple(str(one) for one in sorted(found, key=lambda one: -one.gap)[:5])
    verdict = Verdict.FAIL if _is_wrong(worst.gap, bench) else Verdict.WARN
    cause, step = _cause(found, band.pass_max, verdict)
    return CheckResult(NAME, verdict, measured, band.reason, evidence, cause, step, numbers=numbers)


def _is_wrong(gap: float, bench: Bench) -> bool:
    """The same numbers in another shape: in bfloat16 ten times its rounding is no rounding any more."""
    band = Band.of_bench(bench)
    return not gap <= (band.pass_max if band.fail_max == band.pass_max else 10 * band.pass_max)


def _cause(found: list[Variant], limit: float, verdict: Verdict) -> tuple[str, str]:
    if verdict == Verdict.WARN:
        return (
            "rounding, as far as can be told: packs of other sizes are multiplied by other kernels",
            "vime align-check RUN.toml --only packing model.dtype=float32 tells rounding from a leak",
        )
    leaks = [one for one in found if one.neighbour and one.gap > limit]
    if leaks:
        worst = max(leaks, key=lambda one: one.gap)
        return (
            f"attention reaches over the end of a sample: {worst.name} depends on its neighbour {worst.neighbour}",
            "the packed format needs cu_seqlens (qkv_format thd) in every layer; "
            "megatron.transformer.attention_backend = 'flash'",
        )
    return (
        "log-probs of a prefix depend on what comes after it: padding, positions or a mask that is not causal",
        "look at position ids and at the attention mask of padded sequences",
    )


def _rows(batch: RolloutBatch) -> list[int]:
    """The longest samples and the shortest: the latter are padded."""
    rows = [int(row) for row in np.argsort(-batch.lengths_N, kind="stable") if batch.lengths_N[row] > 1]
    half = -(-SAMPLES // 2)
    return list(dict.fromkeys([*rows[:half], *rows[-(SAMPLES - half) :]]))


def _log_probs(bench: Bench, batch: RolloutBatch, rows: list[int], how: Forward) -> list[np.ndarray]:
    """float32 [L] of each row, all given to the trainer as one batch."""
    chosen = batch.select(rows)
    values_T = bench.trainer.log_probs(chosen, how=how)
    return [values_T[a:b] for a, b in zip(chosen.offsets[:-1], chosen.offsets[1:], strict=True)]


def _prefixes(bench: Bench, batch: RolloutBatch, rows: list[int], alone: dict[int, np.ndarray]) -> Iterator[Variant]:
    """The first half of each sample by itself: shorter packs, with more padding where there is any (case A13)."""
    halves = [_prefix(batch.sample(row)) for row in rows]
    cut = RolloutBatch.from_samples(batch.rollout_id, halves)
    for i, (row, values) in enumerate(zip(rows, _log_probs(bench, cut, list(range(len(rows))), ALONE), strict=True)):
        size = _size(values, alone[row][: len(values)])
        yield Variant(name_of(batch, row), f"prefix of {len(halves[i].token_ids)} tokens alone", size)


def _prefix(sample: Sample) -> Sample:
    n = max(2, len(sample.token_ids) // 2)
    return Sample(
        sample.group_id, sample.index, sample.token_ids[:n], min(n, sample.prompt_len), sample.loss_mask[:n],
        sample.rollout_log_probs[:n], seed=sample.seed,
    )  # fmt: skip


def _neighbours(bench: Bench, batch: RolloutBatch, rows: list[int], alone: dict[int, np.ndarray]) -> Iterator[Variant]:
    """Each sample in one pack after each other, and before it; one that is the only one, beside itself."""
    how = Forward(max_tokens_per_micro_batch=LARGEST)
    for first in rows:
        for second in rows:
            if first == second and len(rows) > 1:
                continue
            values = _pair(bench, batch, (first, second), how)
            names = name_of(batch, first), name_of(batch, second)
            yield Variant(names[1], f"packed after {names[0]}", _size(values[1], alone[second]), names[0])
            yield Variant(names[0], f"packed before {names[1]}", _size(values[0], alone[first]), names[1])


def _pair(bench: Bench, batch: RolloutBatch, pair: tuple[int, int], how: Forward) -> list[np.ndarray]:
    """Log-probs of two samples in one pack: as many pairs as data-parallel ranks, since those share samples out."""
    copies = bench.config.parallel.dp
    values = _log_probs(bench, batch, [pair[0]] * copies + [pair[1]] * copies, how)
    return [values[0], values[copies]]


def _size(ours: np.ndarray, theirs: np.ndarray) -> float:
    size = np.abs(ours.astype(np.float64) - theirs)
    return float(np.where(np.isnan(size), np.inf, size).max(initial=0.0))


CHECK = Check(
    NAME,
    "8g",
    "the trainer: packed as alone",
    "a sample has the same log-probs alone, cut short, and packed before or after others",
    run,
    explained_by=("determinism",),
)
