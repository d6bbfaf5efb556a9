"""num_steps_per_rollout = 1: every ratio is 1 and every kl 0, computed once more by themselves; is grad_norm small?

Source: the debug guide, "first training step", point 3. Axes as in ``vime.types``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vime.align.bench import Bench, Learned
from vime.align.gap import Gap
from vime.align.rounds import MADE_UP
from vime.align.walk import Check
from vime.types import CheckResult, Verdict

NAME = "on_policy"
SMALL = 50.0
"""Largest grad_norm that is called small, of a loss that is a mean over tokens with advantages around 1. Measured on a
tiny model (4 layers, 16 samples, float32 and bfloat16): 1.9 with answers of 2 or 3 tokens, 5.0 with 24, 8.2 with a rank
that counts twice. A sum in place of the mean is larger by the number of tokens: hundreds and more."""
NEEDS = {
    "ratio": "the ratio is 1 in the first optimizer step of a rollout alone, if it packs samples as log_probs did",
    "kl": "policy and reference do not start from one folder",
}


@dataclass(frozen=True, slots=True)
class Equality:
    """One thing that must be exactly 0. ``where``: the tokens at which it is not."""

    name: str
    worst: float
    where: tuple[str, ...] = ()
    text: str = ""


def run(bench: Bench) -> CheckResult:
    first = bench.first
    if first.refused:
        cause = f"the trainer refused the step, see the check gradients: {first.refused}"
        return CheckResult(NAME, Verdict.NOT_TESTED, cause=cause)
    if first.stats.is_skipped:
        return CheckResult(NAME, Verdict.NOT_TESTED, cause=f"the step was skipped: {first.stats.skip_reason}")
    left_out = tuple(f"not asked: {what}: {why}" for what, why in _left_out(bench))
    broken = [e for e in _equalities(bench, first, [what for what, _ in _left_out(bench)]) if e.worst]
    verdict, text = _judged_norm(first)
    numbers = {"grad_norm": first.stats.grad_norm, **{e.name: e.worst for e in broken}}
    explained_by = ("loaded",) if verdict == Verdict.FAIL else None  # no noise takes the gradient away
    if broken:
        measured = "; ".join(f"{e.name}: {e.text}" for e in broken) + f"; {text}"
        evidence = (*(line for e in broken for line in e.where), *left_out)
        cause, next_step = _cause(bench)
        return CheckResult(
            NAME, Verdict.FAIL, measured, _limit(), evidence, cause, next_step, numbers=numbers,
            explained_by=explained_by,
        )  # fmt: skip
    held = [name for name in ("ratio 1", "kl 0") if name.split()[0] not in {what for what, _ in _left_out(bench)}]
    measured = "; ".join([*(f"{name} at every token" for name in held), text])
    cause, next_step = ("", "") if verdict == Verdict.PASS else _cause_of_norm(first)
    return CheckResult(
        NAME, verdict, measured, _limit(), (*left_out, MADE_UP), cause, next_step, numbers=numbers,
        explained_by=explained_by,
    )  # fmt: skip


def _limit() -> str:
    return f"ratio, kl: exact, in every dtype; grad_norm: over 0, up to {SMALL:g} (a mean over tokens)"


def _left_out(bench: Bench) -> list[tuple[str, str]]:
    """Equalities that do not hold under these settings, with the reason (case A17)."""
    found = []
    config = bench.config
    if config.train.num_steps_per_rollout > 1:
        found.append(("ratio", f"train.num_steps_per_rollout = {config.train.num_steps_per_rollout}: {NEEDS['ratio']}"))
    if not config.uses_reference:
        found.append(("kl", "no reference model (algo.log_ref = false, algo.kl_coef = 0)"))
    elif config.model.ref_path not in (None, config.model.path):
        found.append(("kl", f"model.ref_path = {config.model.ref_path!r}: {NEEDS['kl']}"))
    return found


def _equalities(bench: Bench, first: Learned, left_out: list[str]) -> Iterator[Equality]:
    assert first.again_T is not None, "the bench makes a pass of its own before the first step"
    if "ratio" not in left_out:
        gap = Gap.of(first.batch, first.again_T, first.log_probs_T, names=("once more", "log_probs"))
        yield _ratio("ratio of another forward", gap, bench)
        yield _of_the_step("ratio of the step itself", first, "train/ppo_kl_abs", "mean |log ratio|")
    if "kl" not in left_out and first.ref_log_probs_T is not None:
        gap = Gap.of(first.batch, first.again_T, first.ref_log_probs_T, names=("log_probs", "ref_log_probs"))
        yield _ratio("kl of another forward", gap, bench)
        if "ratio" not in left_out:
            yield _of_the_step("kl of the step itself", first, "train/kl_loss", "mean kl")


def _ratio(name: str, gap: Gap, bench: Bench) -> Equality:
    """Two-sided, per token: means of signed numbers cancel."""
    differ = int(np.count_nonzero(gap.difference_K))
    low, high = np.exp(gap.difference_K.min(initial=0.0)), np.exp(gap.difference_K.max(initial=0.0))
    text = f"{differ} of {gap.num_tokens} tokens differ, ratios from {low:.7g} to {high:.7g}"
    worst = gap.max if math.isfinite(gap.max) else math.inf
    return Equality(name, worst, gap.worst_tokens(bench.tokenizer) if differ else (), text)


def _of_the_step(name: str, first: Learned, metric: str, what: str) -> Equality:
    value = first.stats.metrics[metric]
    return Equality(name, abs(value) if math.isfinite(value) else math.inf, (), f"{what} {value:.3g}")


def _judged_norm(first: Learned) -> tuple[Verdict, str]:
    norm = first.stats.grad_norm
    text = f"grad_norm {norm:.4g}"
    if not math.isfinite(norm) or norm <= 0.0:
        return Verdict.FAIL, f"{text} with advantages that are not 0"
    return (Verdict.PASS if norm <= SMALL else Verdict.WARN), text


def _cause_of_norm(first: Learned) -> tuple[str, str]:
    if first.stats.grad_norm > SMALL:
        return (
            f"grad_norm {first.stats.grad_norm:.3g} is large for a mean over tokens: a model far from its data, a "
            "normaliser that is too small, or a kernel of the backward pass",
            "the check gradients compares every parameter with one process; algo.loss_normalization = token_mean",
        )
    return "no gradient arrives at the parameters", "vime align-check RUN.toml --only gradients; is something frozen?"


def _cause(bench: Bench) -> tuple[str, str]:
    if bench.spec.num_experts:
        return (
            "the forward that trains computes otherwise than that of log_probs: for experts, tokens are permuted by "
            "kernels that are not deterministic",
            "megatron.transformer.moe_permute_fusion = true; then megatron.transformer.attention_backend = 'flash'",
        )
    return (
        "the forward that trains computes otherwise than that of log_probs: a kernel that is not deterministic, or "
        "another one where gradients are taken",
        "megatron.transformer.attention_backend = 'flash'; the check determinism names the first layer that differs",
    )


CHECK = Check(
    name=NAME,
    step="9a",
    title="on-policy step: ratio 1, kl 0, a small gradient",
    guide="first step, 3: num_steps_per_rollout == 1: is kl 0, is grad_norm small?",
    run=run,
    explained_by=("loaded", "determinism", "reference", "shapes"),
)
