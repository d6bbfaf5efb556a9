"""``vime replay --regenerate``: recorded samples once more through live engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from vime.errors import UsageError
from vime_cli import output
from vime_cli.options import Call
from vime_cli.prepare import console, prepare

COMMAND = "replay --regenerate"
Regenerate = Annotated[
    bool,
    typer.Option(
        "--regenerate",
        help="Generate the saved rollouts again, with their seeds and options, and say where the answers part; "
        "nothing is trained.",
    ),
]


def regenerate_records(call: Call, load: str | None, ids: str | None, others: Mapping[str, Any]) -> None:
    """Ask again, print, judge. UsageError if ``others``, options of training, were given too."""
    if load is None:
        raise UsageError("--regenerate needs saved rollouts", "name them with --load TEMPLATE")
    if stray := [name for name, value in others.items() if value is not None]:
        raise UsageError(f"--regenerate trains nothing: it does not go with {', '.join(stray)}")
    loaded = prepare(call)
    from vime import runs

    with output.talk():
        found = runs.regenerate(loaded=loaded, console=console(loaded), template=load, ids=ids)
    output.regenerated(found, call.as_json)
