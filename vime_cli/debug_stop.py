"""``vime debug-attach stop``"""

from __future__ import annotations

from typing import Annotated

import typer

from vime_cli import output

Session = Annotated[
    str | None,
    typer.Argument(
        metavar="SESSION", help="Name of the debug run (d-...); may be left out where there is one.", show_default=False
    ),
]
All = Annotated[bool, typer.Option("--all", help="Every debug run of yours that is alive.")]
Address = Annotated[
    str | None,
    typer.Option("--address", metavar="HOST:PORT", help="GCS of the cluster to look in as well.", show_default=False),
]


def stop(session: Session = None, all_: All = False, address: Address = None) -> None:
    """End a debug run with every process of it, also a job.

    Nothing of it is left. It is what ends a job whose run command was killed.
    """
    from vime.debug.launch.stopping import stop_runs

    for line in stop_runs(session, all_, address):
        output.say(f"vime debug: {line}")
