"""A user's function, sync or async: of one sample, or with ``reward.per_group`` of the list of a group's samples.

It returns a finite number, or {"reward": number, ...} whose other entries land in ``sample.metadata["reward"]``; with
``per_group`` a list with one of these per sample.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

from vime.config import schema
from vime.errors import UsageError
from vime.reward.function import load_function

if TYPE_CHECKING:
    from vime.reward.registry import Score


def make(config: schema.Reward) -> Score:
    if config.function is None:
        raise UsageError("reward.function: reward.name = 'user' needs package.module:attribute")
    function = load_function(config.function, "reward.function", num_arguments=1)

    def score(argument: Any) -> Any:
        result = function(argument)
        return asyncio.run(_wait(result)) if inspect.isawaitable(result) else result

    return score


async def _wait(result: Any) -> Any:
    return await result
