"""``vime debug-attach list``"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from vime.errors import UsageError
from vime_cli import output
from vime_cli.options import AsJson

if TYPE_CHECKING:
    from vime.debug.attach.sessions import Seen

WATCH_SECONDS = 1.0
Watch = Annotated[bool, typer.Option("--watch", help="Look again every second, until Ctrl-C.")]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="GCS of the Ray cluster (or RAY_ADDRESS; needed where there are several); local: none.",
    ),
]


def list_stops(watch: Watch = False, as_json: AsJson = False, address: Address = None) -> None:
    """What has stopped: where, why, who, and who waits behind it.

    Stops of the debug runs of this machine, and of those in a Ray cluster; also workers that wait in Ray's own
    debugger. What a killed process left in the list is removed. Exit code 0 also where nothing is stopped.
    """
    from vime.debug.attach import listing, sessions

    if watch and as_json:
        raise UsageError("--watch and --json do not go together", "call list --json again and again")
    if watch:
        _watch(address)
        return
    try:
        seen = sessions.look(address)
    except UsageError:
        _show_here(as_json)
        raise
    if as_json:
        output.data(listing.data(seen))
    else:
        _show(seen)


def _show(seen: Seen) -> None:
    from vime.debug.attach import listing

    found, said = listing.rows(seen), listing.lines(seen)
    if _is_narrow(found):
        said = [*listing.blocks(found), "", *said]
    elif found:
        output.table("", listing.COLUMNS, found, whole=listing.WHOLE)
    if said:
        output.report(said)


def _show_here(as_json: bool) -> None:
    """What needs no cluster is shown where it is not clear which one is meant."""
    from vime.debug.attach import sessions

    here = sessions.Seen(sessions.look_here())
    if here.stops and not as_json:
        _show(here)


def _watch(address: str | None) -> None:
    from vime.debug.attach import listing, sessions

    with output.live(listing.WHOLE) as show:
        while True:
            seen = sessions.look(address)
            found, said = listing.rows(seen), listing.lines(seen)
            if _is_narrow(found):
                show((), (), [*listing.blocks(found), "", *said])
            else:
                show(listing.COLUMNS, found, said)
            time.sleep(WATCH_SECONDS)


def _is_narrow(found: Sequence[Sequence[str]]) -> bool:
    """Whether a table of these rows has no room on the terminal."""
    from vime.debug.attach import listing

    columns = output.width()
    return bool(found) and columns is not None and columns < listing.num_columns(found)
