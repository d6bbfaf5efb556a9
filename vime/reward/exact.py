"""Exact match: 1.0 if the answer equals the label, else 0.0.

The answer is the whole response; with ``reward.pattern`` it is the first group (or, without groups, the whole match) of
the first place where the pattern is found, and a response without such a place scores 0.0. Both sides are stripped of
white space. If both then read as plain decimal numbers they are compared as numbers: thousands commas, a leading plus
and trailing zeros do not count ("1,234" equals "1234.0"). Otherwise every character counts, upper and lower case too.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import TYPE_CHECKING

from vime.config import schema

if TYPE_CHECKING:
    from vime.reward.registry import Score
    from vime.types import Sample

NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?|[+-]?\.\d+")


def make(config: schema.Reward) -> Score:
    pattern = re.compile(config.pattern) if config.pattern is not None else None

    def score(sample: Sample) -> float:
        answer: str | None = sample.text
        if pattern is not None:
            match = pattern.search(sample.text)
            answer = match[1 if pattern.groups else 0] if match else None
        return float(answer is not None and is_equal(answer, sample.label or ""))

    return score


def is_equal(answer: str, label: str) -> bool:
    answer, label = answer.strip(), label.strip()
    if NUMBER.fullmatch(answer) and NUMBER.fullmatch(label):
        return Decimal(answer.replace(",", "")) == Decimal(label.replace(",", ""))
    return answer == label
