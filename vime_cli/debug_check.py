"""``vime debug-attach check``"""

from __future__ import annotations

from vime.errors import UsageError


def check() -> None:
    """Find breakpoints that were left in Python files (to come)."""
    raise UsageError("vime debug-attach check: not in this version yet")
