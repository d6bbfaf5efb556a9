"""``vime debug-attach``"""

from __future__ import annotations

from vime.errors import UsageError


def debug_attach() -> None:
    """Attach a debugger to a running job (to come)."""
    raise UsageError("vime debug-attach: not in this version yet")
