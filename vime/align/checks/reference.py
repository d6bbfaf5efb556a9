"""log_probs == ref_log_probs, token by token and bit by bit, from two independent forwards: kl 0 at the first step."""

from __future__ import annotations

import numpy as np

from vime.align.bench import Bench
from vime.align.gap import Gap
from vime.align.walk import Check
from vime.types import CheckResult, Verdict
from vime.weights.checkpoint import checkpoint_manifest
from vime.weights.manifest import compare

NAME = "reference"
LIMIT = "bitwise: one set of weights, one kind of forward"


def run(bench: Bench) -> CheckResult:
    """Does not apply where the reference is another model on purpose, or where there is none (case A17)."""
    if reason := _other_model(bench):
        return CheckResult(NAME, Verdict.SKIP, cause=reason)
    ref_T = bench.ref_log_probs_T
    if ref_T is None:
        return CheckResult(NAME, Verdict.SKIP, cause="no reference model (algo.log_ref = false, algo.kl_coef = 0)")
    batch = bench.batch
    if not batch.loss_mask_T.any():
        return CheckResult(NAME, Verdict.NOT_TESTED, cause="no trained token in this rollout")
    gap = Gap.of(batch, bench.log_probs_T, ref_T, names=("log_probs", "ref_log_probs"))
    num_differing = int(np.count_nonzero(gap.difference_K))
    k3 = float(np.mean(np.expm1(-gap.difference_K) + gap.difference_K))
    numbers = gap.numbers() | {"differing_tokens": num_differing, "kl": k3}
    measured = f"{num_differing} of {gap.num_tokens} tokens differ, kl (k3) {k3:.3g}"
    if not num_differing:
        return CheckResult(NAME, Verdict.PASS, measured, LIMIT, numbers=numbers)
    return CheckResult(
        NAME, Verdict.FAIL, f"{measured}, largest by {gap.max:.3g}", LIMIT,
        (*_samples(gap), *gap.worst_tokens(bench.tokenizer)), *_cause(bench, gap, num_differing),
        numbers=numbers | {"plots": [gap.plot("log_probs against ref_log_probs", 0.0, bench.tokenizer)]},
    )  # fmt: skip


def _other_model(bench: Bench) -> str:
    path, ref_path = bench.config.model.path, bench.config.model.ref_path
    if ref_path is None or ref_path == path:
        return ""
    found = compare(bench.checkpoint, checkpoint_manifest(ref_path, _dtypes(bench)))
    return f"model.ref_path holds other weights ({len(found)} differences): kl is not 0 by intent" if found else ""


def _dtypes(bench: Bench) -> dict[str, str]:
    return {name: entry.dtype for name, entry in bench.checkpoint.tensors.items()}


def _samples(gap: Gap) -> list[str]:
    differing = [one for one in gap.by_sample() if one.max > 0.0]
    return [f"{len(differing)} of {len(gap.batch)} samples differ; the worst: {differing[0]}"]


def _cause(bench: Bench, gap: Gap, num_differing: int) -> tuple[str, str]:
    """Rounding, or other weights: a wrong weight moves nearly every token, and by much more."""
    if gap.max > 1e-2 and num_differing > gap.num_tokens // 2:
        return (
            "policy and reference do not hold the same weights",
            "the check loaded compares both with their files; is model.ref_path the folder that is meant?",
        )
    attention = bench.trainer.describe().get("attention", "")
    return (
        f"a kernel that is not deterministic (attention: {attention}); with parallel.cp > 1 fused attention in some "
        "versions of transformer-engine",
        "megatron.transformer.attention_backend=flash; NVTE_ALLOW_NONDETERMINISTIC_ALGO=0; the check determinism names "
        "the first layer that differs between two equal forwards",
    )


CHECK = Check(
    NAME,
    "6b",
    "log_probs equal ref_log_probs",
    "first step, 2: are log_probs and ref_log_probs exactly equal (kl = 0 at the first step)? attention-backend flash",
    run,
    explained_by=("determinism", "loaded"),
)
