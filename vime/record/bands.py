"""Bands of log-probs for strips of coloured tokens, the same in the terminal and on the HTML page."""

from __future__ import annotations

import math

BANDS: tuple[tuple[float, str], ...] = (
    (0.9, "p > 0.9"),
    (0.5, "0.5 - 0.9"),
    (0.1, "0.1 - 0.5"),
    (0.01, "0.01 - 0.1"),
    (0.0, "p < 0.01"),
)
"""(smallest probability, name), from likely to unlikely."""

MASKED = "not sampled (prompt, tool)"


def band(log_prob: float) -> int:
    """The number of the band that a log-prob (nats) lies in; what is not a number lies in the last."""
    probability = math.exp(min(log_prob, 0.0)) if log_prob == log_prob else 0.0
    return next(i for i, (smallest, _) in enumerate(BANDS) if probability > smallest or i == len(BANDS) - 1)
