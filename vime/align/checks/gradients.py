"""Every gradient against those of one process: sums over ranks, the normaliser, and who trained on what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from vime.align.bench import Bench, Learned, OneProcess
from vime.align.checks.second import differing
from vime.align.folders import gaps_of, holders_of
from vime.align.plots import bars
from vime.align.rounds import MADE_UP
from vime.align.step_compare import CAUSES, Pair, Row, gradient_row, loss_row, number_row, token_row
from vime.align.step_limits import Limits, limits
from vime.align.walk import Check
from vime.types import CheckResult, Verdict
from vime.weights.shards import Shards

NAME = "gradients"
DRAWN = 20
CERTAIN, MOST = 0.1, 0.9
"""Mean 1 - p below which limits widen; no limit of a relative distance reaches 1, where nothing is tested."""
OF_THE_BACKWARD = ("loaded", "determinism")
"""What may explain gradients that differ although the weights and the log-probs of the forward do not."""
SHARDED = "parallel.distributed_optimizer keeps only shards of the gradients; loss and grad_norm alone are compared"


def run(bench: Bench) -> CheckResult:
    first = bench.first
    if first.refused:
        return _refused(first)
    if first.stats.is_skipped:
        return CheckResult(NAME, Verdict.NOT_TESTED, cause=f"the step was skipped: {first.stats.skip_reason}")
    other = bench.reference_gradients()
    if changed := differing(other.before, first.before):
        return _other_weights(bench, other, changed)
    allowed = _allowed(bench, first)
    if allowed.gradients >= MOST:
        cause = f"the model is certain of every token (mean 1 - p {_doubt(first):.2g}): the gradient is rounding"
        return CheckResult(NAME, Verdict.NOT_TESTED, "", _limit(allowed), cause=cause)
    if other.record.steps[0].is_skipped:
        return _skipped_alone(other, first, allowed)
    rows = _rows(bench, first, other, allowed)
    failed = [row for row in rows.values() if row.verdict == Verdict.FAIL]
    if failed:
        return _differs(rows, failed, other, first, allowed)
    numbers = _numbers(rows, allowed)
    if first.gradients is None:
        measured = f"against {other.layout}: loss {rows['loss'].measured}; grad_norm {rows['grad_norm'].measured}"
        return CheckResult(NAME, Verdict.NOT_TESTED, measured, _limit(allowed), cause=SHARDED, numbers=numbers)
    measured = f"against {other.layout}: {rows['gradients'].measured}; grad_norm {rows['grad_norm'].measured}"
    return CheckResult(
        NAME, Verdict.PASS, measured, _limit(allowed), (*rows["gradients"].evidence, MADE_UP), numbers=numbers
    )


def _allowed(bench: Bench, first: Learned) -> Limits:
    """The gradient of a token is (1 - p) times something, and 1 - p has the rounding of 1: the surer the model, the
    more of its gradient is rounding. (Measured, 1 - p about 0.5: 2.5e-7 in float32, 1.6e-2 in bfloat16.)
    """
    plain = limits(bench.config.model.dtype, bench.spec.num_layers, 0, is_same=False)
    scale = max(1.0, CERTAIN / max(_doubt(first), 1e-12))
    if scale == 1.0:
        return plain
    reason = f"{plain.reason}; x {scale:.2g}, as the model is nearly certain of its tokens"
    return replace(plain, gradients=scale * plain.gradients, grad_norm=scale * plain.grad_norm, reason=reason)


def _doubt(first: Learned) -> float:
    """Mean of 1 - p over the trained tokens, as much as each weighs in the loss."""
    weight_T = np.abs(first.data.loss_weight_T * first.data.advantages_T).astype(np.float64)
    return float(weight_T @ -np.expm1(first.data.old_log_probs_T.astype(np.float64)) / max(weight_T.sum(), 1e-12))


def _rows(bench: Bench, first: Learned, other: OneProcess, allowed: Limits) -> dict[str, Row]:
    """By quantity: one process is the reference, the run's layout the candidate."""
    assert first.record is not None, "the bench keeps a record of its steps"
    own = first.batch.select(range(len(first.data.sample_ids)))
    pair = Pair(own, other.record, first.record, allowed, lambda token_id: bench.tokenizer.decode([token_id]))
    rows = [token_row(pair, "log_probs", allowed.log_probs), loss_row(pair)]
    rows.append(number_row(pair, "grad_norm", allowed.grad_norm))
    if first.gradients is not None and other.gradients is not None:
        gaps = gaps_of(Shards(other.gradients), Shards(first.gradients))
        rows.append(gradient_row(0, gaps, allowed, _holders(bench), _clipped(bench, first)))
    return {row.quantity: row for row in rows}


def _holders(bench: Bench) -> Callable[[str], str]:
    return holders_of(bench.spec, bench.config)


def _clipped(bench: Bench, first: Learned) -> str:
    clip = bench.config.train.clip_grad
    return f"; clipped to {clip:g}" if first.stats.grad_norm > clip else "; not clipped"


def _limit(allowed: Limits) -> str:
    return f"relative L2 {allowed.gradients:.2g}, loss and grad_norm {allowed.loss:.2g} ({allowed.reason})"


def _refused(first: Learned) -> CheckResult:
    return CheckResult(
        NAME, Verdict.FAIL, first.refused, "every trained token of every sample enters the loss once", (),
        "samples were split over the data-parallel ranks, or packed, wrongly",
        "a fault of the trainer: vime replay RUN.toml --load RECORD --vs one locates it",
    )  # fmt: skip


def _skipped_alone(other: OneProcess, first: Learned, allowed: Limits) -> CheckResult:
    return CheckResult(
        NAME, Verdict.FAIL, f"{other.layout} skipped the step that the run took: {first.stats.loss:.6g} is the run's "
        "loss", _limit(allowed), (), "the loss or a gradient of one process is no number, or it has nothing to train "
        "on", "vime replay RUN.toml --load RECORD --vs one repeats the comparison",
    )  # fmt: skip


def _other_weights(bench: Bench, other: OneProcess, changed: list[str]) -> CheckResult:
    lines = tuple(f"{name} ({_holders(bench)(name)})" for name in changed[:3])
    return CheckResult(
        NAME, Verdict.FAIL, f"{len(changed)} of {len(other.before.tensors)} weights are not those that {other.layout} "
        "loads from the same folder: their gradients cannot be compared", "bitwise, before the step", lines,
        "the checkpoint is not loaded alike in this layout, or a step was taken before",
        "vime align-check RUN.toml --only loaded,names",
    )  # fmt: skip


def _differs(
    rows: dict[str, Row], failed: list[Row], other: OneProcess, first: Learned, allowed: Limits
) -> CheckResult:
    """The first quantity that is off, in the order in which they arise, names the cause."""
    first_row = failed[0]
    parts = [f"{row.quantity} {row.measured}" for row in failed]
    evidence = [f"{row.quantity}: {row.where}" for row in failed if row.where]
    evidence += [line for row in failed for line in row.evidence]
    cause = _by_rank(other, first, allowed) if first_row.quantity == "loss" else ""
    return CheckResult(
        NAME,
        Verdict.FAIL,
        f"against {other.layout}: " + "; ".join(parts),
        _limit(allowed),
        tuple(dict.fromkeys((*evidence, MADE_UP))),
        cause or CAUSES[first_row.quantity],
        "vime replay RUN.toml --load RECORD --vs one repeats the comparison; change one size of parallel.* at a "
        "time to see which sum is wrong",
        numbers=_numbers(rows, allowed),
        explained_by=None if rows["log_probs"].verdict == Verdict.FAIL else OF_THE_BACKWARD,
    )


def _by_rank(other: OneProcess, first: Learned, allowed: Limits) -> str:
    """Shares of the loss that are off by one factor a rank: a weight, or a normaliser, of that rank's own."""
    assert first.record is not None
    factors: dict[int, float] = {}
    ranks_N, ours_N, theirs_N = first.record.dp_ranks_N, other.record.sample_losses_N, first.record.sample_losses_N
    for rank in sorted(set(ranks_N.tolist()) - {-1}):
        used = (ranks_N == rank) & (np.abs(ours_N) > allowed.loss * np.abs(ours_N).max())
        ratios = theirs_N[used] / ours_N[used]
        if not len(ratios) or np.ptp(ratios) > 0.1 * abs(np.median(ratios)):
            return ""
        factors[rank] = float(np.median(ratios))
    off = {rank: factor for rank, factor in factors.items() if abs(factor - 1.0) > allowed.loss}
    if not off:
        return ""
    shown = ", ".join(f"dp rank {rank} x {factor:.4g}" for rank, factor in off.items())
    if len(factors) > 1 and len(off) == len(factors):
        return f"the normaliser: each data-parallel rank divides by its own tokens, not by those of all ({shown})"
    return f"the weight of the loss on one rank, or its normaliser ({shown})"


def _numbers(rows: dict[str, Row], allowed: Limits) -> dict[str, object]:
    numbers: dict[str, object] = {name: dict(row.numbers) for name, row in rows.items()}
    if "gradients" in rows:
        worst = {gap.name: gap.relative_l2 for gap, _ in rows["gradients"].tensors[:DRAWN]}
        drawn = bars(
            "Gradients against one process", worst, "parameter", "relative L2", limit=allowed.gradients,
            limit_text=f"{allowed.gradients:.2g}", is_log=True,
        )  # fmt: skip
        numbers["plots"] = [drawn.as_dict()]
    return numbers


CHECK = Check(
    name=NAME,
    step="10",
    title="the gradients are those of one process, parameter by parameter",
    guide="first step, 3: bugs of Megatron and its kernels show in the gradient",
    run=run,
    explained_by=("loaded", "determinism", "sampling", "shapes", "packing", "names", "weights", "routing"),
)
