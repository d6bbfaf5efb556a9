"""``vime align-check``"""

from __future__ import annotations

from vime.errors import UsageError


def align_check() -> None:
    """Check that trainer and engine agree (to come)."""
    raise UsageError("vime align-check: not in this version yet")
