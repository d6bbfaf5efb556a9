"""The table that people read, and the same as plain data."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.measure import Goal, Result, Row, Spread


def as_plain(result: Result) -> dict[str, Any]:
    """JSON data; ``from_plain`` is its inverse."""
    return asdict(result)


def from_plain(data: Mapping[str, Any]) -> Result:
    return Result(data["name"], [_row(row) for row in data["rows"]], list(data["notes"]))


def _row(data: Mapping[str, Any]) -> Row:
    kinds: dict[str, type] = {"measured": Spread, "against": Spread, "ratio": Spread, "goal": Goal}
    return Row(**{k: kinds[k](**v) if k in kinds and v is not None else v for k, v in data.items()})


def show(results: Sequence[Result]) -> None:
    """Print one table for all, then the notes."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = 240
    table = Table(title="median (min-max) over interleaved repetitions", title_justify="left", box=SIMPLE)
    for column in ("benchmark", "what", "unit", "measured", "against", "ratio", "goal", ""):
        table.add_column(column, overflow="fold")
    for result in results:
        for row in result.rows:
            table.add_row(result.name, *cells(row))
    console.print(table)
    for result in results:
        for note in result.notes:
            console.print(f"{result.name}: {note}", soft_wrap=True)
    console.print(f"machine: {os.cpu_count()} cores, load average {' '.join(f'{x:.1f}' for x in os.getloadavg())}")


def cells(row: Row) -> tuple[str, ...]:
    """A row as the text of the table's cells, without the name of its benchmark."""
    against = row.against.text() if row.against else ""
    ratio = row.ratio.text() if row.ratio else ""
    return row.what, row.unit, row.measured.text(), against, ratio, str(row.goal or ""), row.verdict
