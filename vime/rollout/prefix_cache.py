"""How much of the prompts the engines had in their prefix caches: counted beside the samples, never in them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from vime.errors import VimeError
from vime.protocols import RolloutEngine, Rollouts
from vime.reward.breakpoints import held
from vime.types import RolloutBatch

ANSWER_SECONDS = 60.0


@runtime_checkable
class CountsPrompts(Protocol):
    """An engine that counts. Servers that somebody else runs do not."""

    async def prefix_cache(self) -> tuple[int, int]:
        """Prompt tokens of all samples so far, and how many of them were found in the prefix cache."""


@dataclass
class CountedRollouts:
    """Rollouts that report (prompt tokens, cached tokens) of each one; None where an engine does not count."""

    inner: Rollouts
    engines: Sequence[RolloutEngine]
    report: Callable[[tuple[int, int] | None], None]

    def produce(self, rollout_id: int) -> RolloutBatch:
        before = asyncio.run(read(self.engines))
        batch = self.inner.produce(rollout_id)
        after = asyncio.run(read(self.engines))
        self.report(None if before is None or after is None else (after[0] - before[0], after[1] - before[1]))
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


async def read(engines: Sequence[RolloutEngine]) -> tuple[int, int] | None:
    """The counts of all engines together; None if one does not count. VimeError if one does not answer."""
    counting = [engine for engine in engines if isinstance(engine, CountsPrompts)]
    if len(counting) < len(engines):
        return None
    try:
        async with asyncio.timeout(held(ANSWER_SECONDS)):
            counts = await asyncio.gather(*(engine.prefix_cache() for engine in counting))
    except TimeoutError as error:
        text = f"an engine did not say within {held(ANSWER_SECONDS):g} s what it found in its prefix cache"
        raise VimeError(text, "see the engines' log: one of them hangs") from error
    return sum(prompt for prompt, _ in counts), sum(cached for _, cached in counts)
