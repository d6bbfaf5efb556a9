"""Format: 1.0 if ``reward.pattern`` matches the whole response, else 0.0. ``.`` matches line breaks only with (?s)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vime.config import schema

if TYPE_CHECKING:
    from vime.reward.registry import Score
    from vime.types import Sample


def make(config: schema.Reward) -> Score:
    pattern = re.compile(config.pattern or "")

    def score(sample: Sample) -> float:
        return float(pattern.fullmatch(sample.text) is not None)

    return score
