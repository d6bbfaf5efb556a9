"""What is asked of the samples of some records. No numpy: it is made before that is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from vime.record.where import Expression


@dataclass(frozen=True, slots=True)
class Asked:
    """Which samples, in which order, how many. ``is_descending`` turns the order of ``sort`` round."""

    where: Expression | None = None
    sort: Expression | None = None
    is_descending: bool = False
    limit: int = 20
