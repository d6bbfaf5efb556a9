"""The HTML page of ``vime rollout --bisect-crash``: the verdict, then every attempt, setting and request."""

from __future__ import annotations

from collections.abc import Sequence

from vime.report.page import page

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Title, columns, rows."""


def crash_page(verdict: str, model: str, rows: Sequence[tuple[str, str]], tables: Sequence[Table]) -> str:
    """The page, one file. ``rows``: (label, value) of the result."""
    data = {
        "verdict": verdict,
        "about": model,
        "rows": [list(row) for row in rows],
        "tables": [{"title": t, "columns": list(c), "rows": [list(row) for row in r]} for t, c, r in tables],
    }
    return page(f"crash - {model}", "crash", data, ("base",))
