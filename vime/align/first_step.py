"""The debug guide's check of the first step: log_probs == ref_log_probs, and engine against trainer.

Source: the debug guide, "first training step", points 2 and 3. Both compare two independent forwards.
"""

from __future__ import annotations

import numpy as np

from vime.types import CheckResult, RolloutBatch, Verdict


def engine_limit(dtype: str, num_layers: int) -> float:
    """Largest |difference|, nats, between two healthy implementations.

    float32 rounding adds up with depth: 1e-5 up to 4 layers, 5e-6 a layer beyond. (SmolLM2-135M, 30 layers, against
    float64: transformers is off by up to 3e-5, vLLM on a CPU by 5e-5; transformers' eager and SDPA attention differ by
    2e-5. A wrong weight, temperature or token shows as 1e-3 and more.)
    """
    return 5e-2 if dtype == "bfloat16" else 1e-5 + 5e-6 * max(0, num_layers - 4)


def reference_equals_policy(
    batch: RolloutBatch, log_probs_T: np.ndarray, ref_log_probs_T: np.ndarray | None
) -> CheckResult:
    """Before any update, policy and reference are the same weights: their log-probs agree bitwise and kl is 0."""
    name = "log_probs == ref_log_probs"
    if ref_log_probs_T is None:
        return CheckResult(name, Verdict.SKIP, cause="no reference model (algo.log_ref = false, algo.kl_coef = 0)")
    mask_T = batch.loss_mask_T
    if not mask_T.any():
        return CheckResult(name, Verdict.NOT_TESTED, cause="no trained token in this rollout")
    differ = np.flatnonzero(mask_T & (log_probs_T != ref_log_probs_T))
    size = float(np.abs(log_probs_T[mask_T]).mean())
    measured = f"{len(differ)} of {int(mask_T.sum())} tokens differ, mean |log_prob| {size:.3g}"
    if not len(differ):
        return CheckResult(name, Verdict.PASS, measured, "bitwise")
    gap = np.abs(log_probs_T - ref_log_probs_T)
    return CheckResult(
        name,
        Verdict.FAIL,
        f"{measured}, largest by {gap[differ].max():.3g}",
        "bitwise",
        tuple(_token(batch, int(t)) for t in differ[np.argsort(-gap[differ])][:3]),
        "a kernel that is not deterministic, or different starting weights",
        "vime align-check RUN.toml --only 6 says which; try megatron.transformer.attention_backend=flash",
    )


def engine_equals_trainer(batch: RolloutBatch, log_probs_T: np.ndarray, dtype: str, num_layers: int) -> CheckResult:
    """The same tokens under the engine (as sampled) and under the trainer before its first step."""
    name = "engine log_probs == trainer log_probs"
    version = max((row["weight_version_max"] for row in batch.rows), default=0)
    if version > 0:  # a recorded rollout
        cause = f"the rollout was sampled with weights v{version}, the trainer holds those of model.path (v0)"
        return CheckResult(name, Verdict.NOT_TESTED, cause=cause)
    mask_T = batch.loss_mask_T
    if not mask_T.any():
        return CheckResult(name, Verdict.NOT_TESTED, cause="no trained token in this rollout")
    gap_T = np.where(mask_T, np.abs(log_probs_T - batch.rollout_log_probs_T), 0.0)
    limit = engine_limit(dtype, num_layers)
    reason = f"max {limit:.2g} ({dtype}, {num_layers} layers)"
    worst = float(gap_T.max())
    measured = f"max {worst:.2g}, mean {float(gap_T[mask_T].mean()):.2g} over {int(mask_T.sum())} tokens"
    if worst <= limit:
        return CheckResult(name, Verdict.PASS, measured, reason)
    return CheckResult(
        name,
        Verdict.FAIL,
        measured,
        reason,
        tuple(_token(batch, int(t)) for t in np.argsort(-gap_T)[:3]),
        "the engine holds other weights, samples from another distribution, or computes otherwise",
        "vime align-check RUN.toml --skip 10,11,12 says which",
    )


def _token(batch: RolloutBatch, at: int) -> str:
    return f"{batch.place_of(at)} token id {batch.token_ids_T[at]}"
