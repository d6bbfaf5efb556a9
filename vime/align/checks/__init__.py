"""The checks of ``vime align-check``, in the order of the debug guide. A new check is one file and one line here."""

from __future__ import annotations

from vime.align.checks import (
    batch,
    decode,
    engine,
    head,
    order,
    packing,
    prefix_cache,
    sampling,
    shapes,
    tokens,
)
from vime.align.walk import Check

CHECKS: tuple[Check, ...] = (
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
)
