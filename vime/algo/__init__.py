"""Advantage estimators by name: one short file each, loaded when asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import numpy as np

from vime.config.schema import Algo
from vime.errors import UsageError

REGISTRY = {"grpo": "vime.algo.grpo:advantages"}

Advantages = Callable[[Algo, np.ndarray, np.ndarray], np.ndarray]


def find(name: str) -> Advantages:
    """The estimator called ``name``; UsageError with the choices otherwise."""
    if name not in REGISTRY:
        raise UsageError(f"algo.name = {name!r}: unknown", f"choose one of: {', '.join(sorted(REGISTRY))}")
    module, attribute = REGISTRY[name].split(":")
    return getattr(import_module(module), attribute)
