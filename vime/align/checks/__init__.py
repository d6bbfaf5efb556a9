"""The checks of ``vime align-check``, in the order of the debug guide. A new check is one file and one line here."""

from __future__ import annotations

from vime.align.checks import (
    batch,
    coherence,
    decode,
    engine,
    gradients,
    head,
    memory,
    on_policy,
    order,
    packing,
    prefix_cache,
    resume,
    sampling,
    second,
    shapes,
    tokens,
    zero_advantage,
)
from vime.align.walk import Check

CHECKS: tuple[Check, ...] = (
    coherence.CHECK,
    sampling.CHECK,
    tokens.CHECK,
    decode.CHECK,
    batch.CHECK,
    prefix_cache.CHECK,
    order.CHECK,
    packing.CHECK,
    shapes.CHECK,
    head.CHECK,
    engine.CHECK,
    on_policy.CHECK,
    zero_advantage.CHECK,
    gradients.CHECK,
    second.CHECK,
    memory.CHECK,
    resume.CHECK,
)
