"""Rewards: a number for each sample, computed in worker processes with a time limit."""

from typing import Any

from vime.reward.registry import REWARDS, check, needs_label

__all__ = ["REWARDS", "RewardPool", "check", "needs_label"]


def __getattr__(name: str) -> Any:
    if name == "RewardPool":  # needs numpy, which checking a configuration does not
        from vime.reward.pool import RewardPool

        return RewardPool
    raise AttributeError(name)
