"""The limits of one request, and groups that are whole or not at all."""

from __future__ import annotations

import asyncio

import pytest
from conftest import make_prompt

from vime.backends.vllm.requests import all_or_none, options_within
from vime.backends.vllm.sampling import StopIds
from vime.config.schema import Sampling
from vime.errors import PromptTooLong

STOP = StopIds({1: ("config.json",)})


def limits(prompt_len: int, **sampling: int) -> tuple[int, int]:
    found = options_within(make_prompt(prompt_len), Sampling(**sampling), STOP, 10, "raise it")
    assert found["stop_token_ids"] == [1]
    return found["max_tokens"], found["min_tokens"]


def test_the_longest_answer_is_what_the_prompt_leaves_of_the_context() -> None:
    assert limits(4, max_response_len=5) == (5, 0)
    assert limits(4, max_response_len=7) == (6, 0)
    assert limits(9, max_response_len=7, min_response_len=3) == (1, 1)
    assert limits(4, max_response_len=7, min_response_len=3) == (6, 3)


@pytest.mark.parametrize("prompt_len", [10, 11])
def test_a_prompt_without_room_is_refused_alone(prompt_len: int) -> None:
    """Case R09."""
    with pytest.raises(PromptTooLong, match=f"prompt 0 has {prompt_len} tokens; the context of 10") as refused:
        limits(prompt_len)
    assert refused.value.hint == "raise it"


def test_results_come_in_order_whatever_finishes_first() -> None:
    async def later(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    assert asyncio.run(all_or_none([later(0.02), later(0.0), later(0.01)])) == [0.02, 0.0, 0.01]
    assert asyncio.run(all_or_none([])) == []


def test_one_failure_cancels_the_others_before_it_is_raised() -> None:
    ended = []

    async def fail() -> None:
        raise ConnectionError("gone")

    async def wait() -> None:
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def both() -> None:
        with pytest.raises(ConnectionError, match="gone"):
            await all_or_none([wait(), fail(), wait()])
        assert ended == ["cancelled"] * 2
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(all_or_none([wait()]), 0.01)
        assert ended == ["cancelled"] * 3

    asyncio.run(both())
