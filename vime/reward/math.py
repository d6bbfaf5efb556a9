"""Mathematical equality by math-verify: 1.0 if the final answer of the response equals the label, else 0.0.

What stands before the last ``</think>`` is no answer; a response that never ends its thinking scores 0.0. The label is
read as the content of a \\boxed{}, so that plain numbers, LaTeX and words all work.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vime.config import schema

if TYPE_CHECKING:
    from vime.reward.registry import Score
    from vime.types import Sample


def make(config: schema.Reward) -> Score:
    import math_verify

    # Its own limits use signal.alarm, which fails outside the main thread and cannot stop a call into C; ours is the
    # worker process. It then warns at every call that there is no limit.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def score(sample: Sample) -> float:
        label = sample.label or ""
        gold = math_verify.parse(label if "\\boxed" in label else f"\\boxed{{{label}}}", parsing_timeout=None)
        answer = math_verify.parse(final_part(sample.text), parsing_timeout=None)
        return float(math_verify.verify(gold, answer, timeout_seconds=None))

    return score


def final_part(text: str) -> str:
    """What follows the thinking; "" if the thinking never ends."""
    _, end, tail = text.rpartition("</think>")
    if end:
        return tail
    return "" if "<think>" in tail else tail
