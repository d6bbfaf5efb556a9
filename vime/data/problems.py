"""Many problems, one message."""

from __future__ import annotations

from collections.abc import Sequence

NUM_SHOWN = 20


def listed(problems: Sequence[str], num_shown: int = NUM_SHOWN) -> str:
    """The first ``num_shown`` problems, one a line, and the count of the others."""
    lines = list(problems[:num_shown])
    if len(problems) > num_shown:
        lines.append(f"... and {len(problems) - num_shown} more ({len(problems)} in all)")
    return "\n".join(lines)
