"""The rewards vime knows by name, and the checks that need no sample."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from vime.config import schema
from vime.errors import UsageError
from vime.reward.function import load_function

REWARDS = {
    "exact": "vime.reward.exact",
    "math": "vime.reward.math",
    "format": "vime.reward.format",
    "user": "vime.reward.user",
}
"""Name -> module with ``make(config) -> Score``; imported when it is used."""

Score = Callable[[Any], Any]
"""One sample (or, with ``per_group``, a list of samples) -> number, or {"reward": number, ...} (or a list of these)."""


def make(config: schema.Reward) -> Score:
    """The function of ``reward.name``. UsageError naming the choices if there is no such name."""
    if config.name not in REWARDS:
        raise UsageError(f"reward.name = {config.name!r}: must be one of {', '.join(REWARDS)}")
    return importlib.import_module(REWARDS[config.name]).make(config)


def needs_label(config: schema.Reward) -> bool:
    """Whether every sample must carry a label for this reward."""
    return config.name in ("exact", "math")


def title(config: schema.Reward) -> str:
    """How messages call the reward: ``math``, or ``user (package.module:attribute)``."""
    return f"user ({config.function})" if config.name == "user" else config.name


def check(config: schema.Reward, import_paths: Sequence[str] = ()) -> list[str]:
    """Problems that show without a sample: broken pattern, function missing, not importable, not callable."""
    problems = []
    if config.pattern is not None:
        try:
            re.compile(config.pattern)
        except re.error as error:
            problems.append(f"reward.pattern = {config.pattern!r}: not a regular expression: {error}")
    elif config.name == "format":
        problems.append("reward.pattern: reward.name = 'format' needs a pattern")
    if config.name == "user":
        if config.function is None:
            problems.append("reward.function: reward.name = 'user' needs package.module:attribute")
        else:
            try:
                load_function(config.function, "reward.function", num_arguments=1, import_paths=import_paths)
            except UsageError as error:
                problems.append(error.message)
    elif config.function is not None:
        problems.append(f"reward.function = {config.function!r} is only used with reward.name = 'user'")
    if config.per_group and config.name != "user":
        problems.append(f"reward.per_group is only used with reward.name = 'user', not {config.name!r}")
    return problems
