"""All advantages 0: the gradient is exactly 0, and the weights stay as they are, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from vime.align.bench import Bench
from vime.align.walk import Check
from vime.errors import CheckFailed
from vime.types import CheckResult, StepStats, TrainData, Verdict, WeightManifest

NAME = "zero_advantage"
SMALLEST = np.float32(1e-45)
"""The smallest float32 above 0. As the advantage of one token it makes the trainer compute a step that it would skip,
and its gradient is too small to be a number: what is left is what something else puts into the gradient."""


@dataclass(frozen=True, slots=True)
class Zero:
    """A step without advantages. before, after: the trainer's weights."""

    name: str
    stats: StepStats
    before: WeightManifest
    after: WeightManifest

    @property
    def changed(self) -> list[str]:
        return [n for n, entry in self.before.tensors.items() if entry.digest != self.after.tensors[n].digest]


def run(bench: Bench) -> CheckResult:
    if reason := _other_signal(bench):
        return CheckResult(NAME, Verdict.SKIP, cause=reason)
    if bench.first.refused:
        cause = f"the trainer refuses the step, see the check gradients: {bench.first.refused}"
        return CheckResult(NAME, Verdict.NOT_TESTED, cause=cause)
    if not np.any(bench.first.data.loss_weight_T):
        return CheckResult(NAME, Verdict.NOT_TESTED, cause="no trained token in the first step")
    data = zero_data(bench)
    try:
        zeros = [_taken(bench, "every advantage 0", data)]
        if zeros[0].stats.is_skipped:  # by rule, before any forward: see what the gradient would have been
            zeros.append(_taken(bench, "one advantage of 1e-45", _one_smallest(data)))
    except CheckFailed as error:
        cause = f"the trainer refuses the step, see the check gradients: {error.message}"
        return CheckResult(NAME, Verdict.NOT_TESTED, cause=cause)
    return _judged(zeros)


def _other_signal(bench: Bench) -> str:
    """What enters the gradient beside the advantages; "" for nothing."""
    algo = bench.config.algo
    if algo.entropy_coef:
        return f"algo.entropy_coef = {algo.entropy_coef:g} has a gradient of its own"
    if algo.kl_coef and algo.kl_estimator == "k1":
        return "algo.kl_estimator = k1: its gradient is not 0 where policy and reference agree; k2, k3 and low_var are"
    return ""


def zero_data(bench: Bench) -> TrainData:
    """The data of the first step with advantages 0, and old and reference log-probs that are the policy's of now, so
    that kl (k2, k3, low_var) has derivative exactly 0 wherever the policy has moved to.
    """
    data, batch = bench.first.data, bench.first.batch
    own = batch if len(batch) == len(data.sample_ids) else batch.select(range(len(data.sample_ids)))
    now_T = bench.trainer.log_probs(own)
    return replace(
        data,
        advantages_T=np.zeros_like(data.advantages_T),
        old_log_probs_T=now_T,
        ref_log_probs_T=None if data.ref_log_probs_T is None else now_T,
    )


def _one_smallest(data: TrainData) -> TrainData:
    advantages_T = data.advantages_T.copy()
    advantages_T[np.flatnonzero(data.loss_weight_T)[0]] = SMALLEST
    return replace(data, advantages_T=advantages_T)


def _taken(bench: Bench, name: str, data: TrainData) -> Zero:
    before = bench.trainer.manifest()
    stats = bench.trainer.step(data)
    return Zero(name, stats, before, bench.trainer.manifest())


def _judged(zeros: list[Zero]) -> CheckResult:
    norms = [f"{zero.name}: {_said(zero.stats)}" for zero in zeros]
    nonzero = [zero for zero in zeros if zero.stats.grad_norm != 0.0]
    moved = [zero for zero in zeros if zero.stats.is_skipped and zero.changed]
    numbers = {zero.name: zero.stats.grad_norm for zero in zeros}
    limit = "grad_norm exactly 0.0, weights bitwise (no rounding: every term is 0)"
    if moved:
        names = moved[0].changed
        return CheckResult(
            NAME, Verdict.FAIL, f"{len(names)} of {len(moved[0].before.tensors)} tensors changed in a step that was "
            "skipped", limit, tuple(names[:3]), "the optimizer moved the weights without a gradient: its momentum, or "
            "weight decay", "look at what is done between the skip and the return of the step", numbers=numbers,
        )  # fmt: skip
    if nonzero:
        return CheckResult(
            NAME, Verdict.FAIL, "; ".join(norms), limit, (), "something beside the advantages is in the gradient: what "
            "was left in the buffers of the step before, a loss of its own (router, auxiliary), or masked tokens",
            "megatron.transformer settings that add a loss; compare --only gradients", numbers=numbers,
        )  # fmt: skip
    if zeros[0].stats.is_skipped:
        norms.append("weights of the skipped step bitwise unchanged")
    return CheckResult(NAME, Verdict.PASS, "; ".join(norms), limit, numbers=numbers)


def _said(stats: StepStats) -> str:
    return f"grad_norm {stats.grad_norm:g}" + (" (skipped, nothing computed)" if stats.is_skipped else " (computed)")


CHECK = Check(
    name=NAME,
    step="9b",
    title="without advantages there is no gradient",
    guide="first step, 3: grad_norm is 0 where every advantage is 0",
    run=run,
)
