"""What engines of our own and servers of somebody else share: the limits of a request, and that a group is whole."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from vime.backends.vllm.sampling import StopIds, request_options
from vime.config.schema import Sampling
from vime.errors import PromptTooLong
from vime.types import Prompt


def options_within(
    prompt: Prompt, options: Sampling, stop: StopIds, max_model_len: int, way_out: str
) -> dict[str, Any]:
    """As ``request_options``, with ``max_tokens`` cut to what ``prompt`` leaves of the context.

    Raises PromptTooLong, with the hint ``way_out``, where that is nothing.
    """
    room = max_model_len - len(prompt.token_ids)
    if room < 1:
        raise PromptTooLong(
            f"prompt {prompt.group_id} has {len(prompt.token_ids)} tokens; the context of {max_model_len} "
            "leaves no room for a response token",
            way_out,
        )
    found = request_options(options, stop)
    found["max_tokens"] = min(options.max_response_len, room)
    found["min_tokens"] = min(found["min_tokens"], found["max_tokens"])
    return found


async def all_or_none(calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Results in order; if one call raises, the others are cancelled (their requests aborted) before it is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
