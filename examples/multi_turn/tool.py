"""Answers in several turns with a calculator: what `rollout.generate` in run.toml names.

The model writes "calc(37 + 48)", reads "result: 85", and answers. Only what the model wrote is trained on; what the
calculator said is in the sample, without loss.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vime.protocols import RolloutEngine
from vime.rollout.turns import Turns
from vime.types import Prompt, Sample

MAX_TURNS = 3
CALL = re.compile(r"calc\((\d{1,9}) *([-+*]) *(\d{1,9})\)")


async def generate(
    engine: RolloutEngine, prompt: Prompt, seeds: Sequence[int], sampling: Mapping[str, Any]
) -> list[Sample]:
    """One sample per seed; the turns of different samples go on side by side."""
    return await asyncio.gather(*(solve(engine, prompt, i, seed, sampling) for i, seed in enumerate(seeds)))


async def solve(engine: RolloutEngine, prompt: Prompt, index: int, seed: int, sampling: Mapping[str, Any]) -> Sample:
    """Ask, and let the calculator answer, until the model calls it no more. ``text`` is the last turn alone."""
    limit = sampling["max_response_len"]
    turns = Turns(prompt, seed, index, tokenizer=engine.tokenizer, max_response_len=MAX_TURNS * limit)
    answer = await turns.ask(engine, sampling)
    text = ""
    while answer is not None:
        text = answer.text
        result = calculate(text)
        if result is None or turns.num_turns == MAX_TURNS:
            break
        turns.observe(f"\n<|im_start|>user\nresult: {result}<|im_end|>\n<|im_start|>assistant\n")
        answer = await turns.ask(engine, sampling)
    return turns.sample(text=text)


def calculate(text: str) -> int | None:
    """The result of the first call in ``text``; None where there is none."""
    found = CALL.search(text)
    if found is None:
        return None
    a, b = int(found[1]), int(found[3])
    return {"+": a + b, "-": a - b, "*": a * b}[found[2]]
