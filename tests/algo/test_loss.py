"""The policy loss per token against hand-computed numbers."""

import math

import pytest
import torch

from vime.algo.loss import kl_estimate, policy_loss
from vime.config.schema import Algo


def test_clip_bounds_are_separate():
    log_probs = torch.log(torch.tensor([1.5, 0.5, 1.5, 0.5], dtype=torch.float64))
    loss, stats = policy_loss(
        Algo(eps_clip_low=0.2, eps_clip_high=0.3),
        log_probs,
        torch.zeros(4, dtype=torch.float64),
        torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64),
    )
    assert loss.tolist() == pytest.approx([-1.3, -0.5, 1.5, 0.8])
    assert stats["pg_clipfrac"].tolist() == [1, 0, 0, 1]


def test_dual_clip_bounds_only_negative_advantages():
    log_probs = torch.log(torch.tensor([10.0, 10.0], dtype=torch.float64))
    loss, stats = policy_loss(
        Algo(dual_clip=3.0), log_probs, torch.zeros(2, dtype=torch.float64), torch.tensor([-1.0, 1.0]).double()
    )
    assert loss.tolist() == pytest.approx([3.0, -1.2])
    assert stats["pg_clipfrac_lower"].tolist() == [1, 0]
    assert stats["pg_loss"].tolist() == loss.tolist()
    loss, _ = policy_loss(Algo(), log_probs, torch.zeros(2, dtype=torch.float64), torch.tensor([-1.0, 1.0]).double())
    assert loss.tolist() == pytest.approx([10.0, -1.2])


@pytest.mark.parametrize(
    ("estimator", "value"),
    [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 1 + 0.5), ("low_var", math.exp(-0.5) - 1 + 0.5)],
)
def test_kl_estimators(estimator, value):
    policy, ref = torch.tensor([-1.0]).double(), torch.tensor([-1.5]).double()
    assert kl_estimate(policy, ref, estimator).item() == pytest.approx(value)
    assert kl_estimate(policy, policy.clone(), estimator).item() == 0.0


def test_low_var_is_bounded():
    assert kl_estimate(torch.tensor([-20.0]), torch.tensor([0.0]), "k3").item() > 10
    assert kl_estimate(torch.tensor([-20.0]), torch.tensor([0.0]), "low_var").item() == 10.0


def test_kl_gradient_is_exactly_zero_at_the_reference():
    policy = torch.tensor([-1.234], requires_grad=True)
    loss, stats = policy_loss(
        Algo(kl_coef=0.5), policy, policy.detach().clone(), torch.zeros(1), ref_log_probs_T=policy.detach().clone()
    )
    loss.sum().backward()
    assert stats["kl_loss"].item() == 0.0
    assert stats["ppo_kl"].item() == 0.0
    assert policy.grad.item() == 0.0


def test_entropy_bonus_lowers_the_loss():
    zero = torch.zeros(1)
    loss, _ = policy_loss(Algo(entropy_coef=0.1), zero, zero, zero, entropy_T=torch.tensor([2.0]))
    assert loss.item() == pytest.approx(-0.2)
