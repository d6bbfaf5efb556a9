"""Rewards: a number for each sample, computed in worker processes with a time limit."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vime.reward.pool import RewardPool
    from vime.reward.registry import REWARDS, check, needs_label

__all__ = ["REWARDS", "RewardPool", "check", "needs_label"]
_MODULES = {"RewardPool": "pool", "REWARDS": "registry", "check": "registry", "needs_label": "registry"}


def __getattr__(name: str) -> Any:
    """Loaded when asked for: the pool needs numpy, and ``vime.reward.breakpoints``, which every process of a debug run
    imports before all else, nothing.
    """
    if name in _MODULES:
        return getattr(importlib.import_module(f"vime.reward.{_MODULES[name]}"), name)
    raise AttributeError(name)
