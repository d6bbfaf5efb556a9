"""Does each log-prob stand at its own token? A scan over shifts, a search among the other samples, retokenisation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vime.align.bench import Bench
from vime.align.gap import Band, Compared, SampleGap, compared, name_of
from vime.align.walk import Check
from vime.types import CheckResult, RolloutBatch, Status, Verdict

NAME = "tokens"
SHIFTS = (-2, -1, 1, 2)
FACTOR = 10.0
"""Log-probs belong elsewhere if there they differ so many times less than in their own place."""
MIN_OVERLAP = 2
"""Tokens that must agree: one may by chance. In bfloat16 twice as many."""


@dataclass(frozen=True, slots=True)
class Misplaced:
    """A sample whose log-probs fit ``place`` ("shift +1", "sample 3/1") and not where they stand; means, nats."""

    name: str
    place: str
    here: float
    there: float
    overlap: int

    def __str__(self) -> str:
        there = f"{self.there:.2g} at {self.place} over {self.overlap} tokens"
        return f"{self.name}: mean gap {self.here:.2g} in place, {there}"


def run(bench: Bench) -> CheckResult:
    found = compared(bench)
    if isinstance(found, str):
        return CheckResult(NAME, Verdict.NOT_TESTED, cause=found)
    ours, theirs = (_by_sample(found.gap.batch, side) for side in (found.gap.ours_T, found.gap.theirs_T))
    bad = [one for one in found.gap.by_sample() if _is_bad(one, found)]
    misplaced = [place for one in bad if (place := _place(one, ours, theirs, found)) is not None]
    numbers = {"num_samples": len(ours), "num_bad": len(bad), "num_misplaced": len(misplaced)}
    said = tuple(_said(bench, found.gap.batch))
    if misplaced:
        return _failed(found, misplaced, numbers, said)
    off = {one.row for one in bad}
    best = sum(row not in off or _best_shift(ours[row], theirs[row]) == 0 for row in ours)
    measured = f"shift 0 fits best in {best} of {len(ours)} samples"
    if bad and 2 * best < len(ours):
        cause = f"the sides differ too much ({found.gap}) to see which log-prob belongs to which token"
        return CheckResult(NAME, Verdict.NOT_TESTED, measured, "", said, cause, numbers=numbers)
    return CheckResult(NAME, Verdict.PASS, measured, "at its own token", said, numbers=numbers)


def _failed(found: Compared, misplaced: list[Misplaced], numbers: dict[str, int], said: tuple[str, ...]) -> CheckResult:
    places = [one.place for one in misplaced if one.place.startswith("shift")]
    common = max(sorted(set(places)), key=places.count, default="")
    if 2 * len(places) >= len(misplaced):
        late = "late" if common.startswith("shift +") else "early"
        cause = f"the engine's log-probs stand {common[-1]} token(s) {late}: that at t belongs to the token at t"
        step = "align per-token data with token_ids from index 0; the first token has none"
    else:
        cause = "samples have the log-probs of others: " + "; ".join(f"{m.name} fits {m.place}" for m in misplaced[:3])
        step = "match answers with requests by their ids, not by their order of arrival"
    measured = f"{len(misplaced)} of {numbers['num_samples']} samples have misplaced log-probs"
    evidence = (*map(str, misplaced[:5]), *said)
    return CheckResult(NAME, Verdict.FAIL, measured, "at its own token", evidence, cause, step, numbers=numbers)


def _is_bad(one: SampleGap, found: Compared) -> bool:
    """More than rounding: of few tokens in bfloat16 the mean is above its limit now and then."""
    band = found.band
    return not one.max <= band.pass_max if _is_exact(band) else not one.mean <= band.fail_mean


def _is_exact(band: Band) -> bool:
    """Whether two log-probs that agree within the band can hardly do so by chance: in float32."""
    return not np.isfinite(band.pass_mean)


def _by_sample(batch: RolloutBatch, side_T: np.ndarray) -> dict[int, np.ndarray]:
    """float64 log-probs of the sampled tokens of each sample that has any, by row."""
    found = {}
    for row in range(len(batch)):
        own = slice(int(batch.offsets[row]), int(batch.offsets[row + 1]))
        if batch.loss_mask_T[own].any():
            found[row] = side_T[own][batch.loss_mask_T[own]].astype(np.float64)
    return found


def _place(
    one: SampleGap, ours: dict[int, np.ndarray], theirs: dict[int, np.ndarray], found: Compared
) -> Misplaced | None:
    """Where the engine's log-probs of a sample fit much better than in their place; None for nowhere."""
    places = [(f"shift {s:+d}", *_shifted_gap(ours[one.row], theirs[one.row], s)) for s in SHIFTS]
    for row, other in theirs.items():
        if row != one.row:
            places.append((name_of(found.gap.batch, row), *_shifted_gap(ours[one.row], other, 0)))
    place, there, overlap = min(places, key=lambda each: each[1])
    rounding, least = (
        (found.band.pass_max, MIN_OVERLAP) if _is_exact(found.band) else (found.band.pass_mean, 2 * MIN_OVERLAP)
    )
    if there * FACTOR <= one.mean and there <= 2.0 * rounding and overlap >= least:
        return Misplaced(one.name, place, one.mean, there, overlap)
    return None


def _shifted_gap(ours: np.ndarray, theirs: np.ndarray, shift: int) -> tuple[float, int]:
    """(mean |ours[t + shift] - theirs[t]|, number of t); inf where too few overlap."""
    a, b = (ours[shift:], theirs) if shift >= 0 else (ours, theirs[-shift:])
    n = min(len(a), len(b))
    if n < MIN_OVERLAP:
        return np.inf, n
    mean = float(np.abs(a[:n] - b[:n]).mean())
    return (np.inf if np.isnan(mean) else mean), n


def _best_shift(ours: np.ndarray, theirs: np.ndarray) -> int | None:
    """None where it cannot be told: for a sample too short to be shifted, or with a value that is no number."""
    gaps = {shift: _shifted_gap(ours, theirs, shift)[0] for shift in (0, *SHIFTS)}
    return min(gaps, key=lambda shift: gaps[shift]) if np.isfinite(gaps[0]) else None


def _said(bench: Bench, batch: RolloutBatch) -> Iterator[str]:
    """What is no fault but belongs to the question: texts that would not give the same ids, and truncated samples."""
    changed = [row for row in range(len(batch)) if _is_retokenised(bench, batch, row)]
    if changed:
        names = ", ".join(name_of(batch, row) for row in changed[:3])
        yield (
            f"{len(changed)} of {len(batch)} responses would be other ids if decoded and encoded again ({names}): "
            "vime trains on the engine's ids, never on texts"
        )
    truncated = sum(row["status"] == Status.TRUNCATED for row in batch.rows)
    if truncated:
        yield f"{truncated} of {len(batch)} samples are truncated: they end without a stop id"


def _is_retokenised(bench: Bench, batch: RolloutBatch, row: int) -> bool:
    start = int(batch.offsets[row] + batch.prompt_lens_N[row])
    ids = batch.token_ids_T[start : int(batch.offsets[row + 1])].tolist()
    again = bench.tokenizer.encode(bench.tokenizer.decode(ids), add_special_tokens=False)
    return list(again) != ids


CHECK = Check(
    NAME,
    "8b",
    "every log-prob stands at its own token",
    "log-prob t is that of token t given those before it, in the engine's answers as in the trainer",
    run,
    explained_by=("sampling",),
)
