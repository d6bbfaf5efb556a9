"""Learning rate per optimizer step. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LrSchedule:
    """Linear warm-up to ``peak``, then constant, or linear or cosine decay towards ``end`` over the rest of the run."""

    peak: float
    end: float
    shape: str
    num_warmup_steps: int
    num_steps: int

    def at(self, step: int) -> float:
        """Rate of optimizer step ``step``, counted from 0.

        Warm-up step k uses peak * (k + 1) / num_warmup_steps, so that no step has rate 0; the decay starts at ``peak``
        and would reach ``end`` one step after the last.
        """
        if step < self.num_warmup_steps:
            return self.peak * (step + 1) / self.num_warmup_steps
        if self.shape == "constant":
            return self.peak
        span = max(1, self.num_steps - self.num_warmup_steps)
        done = min(1.0, (step - self.num_warmup_steps) / span)
        left = 1.0 - done if self.shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.end + (self.peak - self.end) * left
