"""Policy loss per token: PPO clip with separate bounds, dual clip, KL to the reference, entropy.

Axes: T tokens of one packed micro-batch. All functions return one value per token; weighting and the division by the
global normaliser happen once, in the trainer, so that the result does not depend on how tokens are packed or sharded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vime.config.schema import Algo

if TYPE_CHECKING:
    from torch import Tensor


def kl_estimate(log_probs_T: Tensor, ref_log_probs_T: Tensor, estimator: str) -> Tensor:
    """KL(policy || reference) per token, nats, from samples of the policy.

    With r = log_probs - ref_log_probs: k1 = r; k2 = r^2 / 2; k3 = exp(-r) - 1 + r (Schulman 2020, "Approximating KL
    divergence"); low_var is k3 clipped to [-10, 10]. All are exactly 0 where both log-probs are equal.
    """
    r = log_probs_T - ref_log_probs_T
    if estimator == "k1":
        return r
    if estimator == "k2":
        return 0.5 * r * r
    k3 = (-r).exp() - 1.0 + r
    return k3.clamp(-10.0, 10.0) if estimator == "low_var" else k3


def policy_loss(
    algo: Algo,
    log_probs_T: Tensor,
    old_log_probs_T: Tensor,
    advantages_T: Tensor,
    ref_log_probs_T: Tensor | None = None,
    entropy_T: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss per token, and statistics per token (detached).

    ratio = exp(log_probs - old_log_probs); pg = max(-A ratio, -A clip(ratio, 1 - low, 1 + high)) (Schulman et al. 2017,
    arXiv:1707.06347; separate bounds: DAPO, arXiv:2503.14476); dual clip: pg = min(pg, -c A) where A < 0 (Ye et al.
    2019, arXiv:1912.09729). loss = pg + kl_coef * kl - entropy_coef * entropy.
    """
    log_ratio_T = log_probs_T - old_log_probs_T
    ratio_T = log_ratio_T.exp()
    unclipped_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1.0 - algo.eps_clip_low, 1.0 + algo.eps_clip_high)
    pg_T = unclipped_T.maximum(clipped_T)
    stats = {
        "pg_clipfrac": (clipped_T > unclipped_T).detach().to(pg_T.dtype),
        "ppo_kl": -log_ratio_T.detach(),
        "ppo_kl_abs": log_ratio_T.detach().abs(),
    }
    if algo.dual_clip is not None:
        bound_T = pg_T.where(advantages_T >= 0, pg_T.minimum(-algo.dual_clip * advantages_T))
        stats["pg_clipfrac_lower"] = (bound_T < pg_T).detach().to(pg_T.dtype)
        pg_T = bound_T
    stats["pg_loss"] = pg_T.detach()
    loss_T = pg_T
    if ref_log_probs_T is not None:
        kl_T = kl_estimate(log_probs_T, ref_log_probs_T, algo.kl_estimator)
        stats["kl_loss"] = kl_T.detach()
        if algo.kl_coef:
            loss_T = loss_T + algo.kl_coef * kl_T
    if entropy_T is not None:
        stats["entropy"] = entropy_T.detach()
        if algo.entropy_coef:
            loss_T = loss_T - algo.entropy_coef * entropy_T
    return loss_T, stats
