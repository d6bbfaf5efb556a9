"""``vime dump-weights``"""

from __future__ import annotations

from vime.errors import UsageError


def dump_weights() -> None:
    """Compare weights tensor by tensor (to come)."""
    raise UsageError("vime dump-weights: not in this version yet")
