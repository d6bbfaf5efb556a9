"""``vime debug-attach resume`` and ``vime debug-attach pause``"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from vime.errors import UsageError
from vime_cli import output
from vime_cli.debug_list import Address

if TYPE_CHECKING:
    from vime.debug.attach.sessions import Seen
    from vime.debug.stop.records import Stop

Which = Annotated[
    str | None,
    typer.Argument(
        metavar="KEY|rank=N|ROLE|RUN",
        help="A stop as list shows it: its key or the beginning of that, rank=N, or a role such as driver; "
        "or all stops of a debug run, such as d-3fa91c.",
    ),
]
Everything = Annotated[bool, typer.Option("--all", help="All stops of the debug run, where there is one.")]
Whom = Annotated[
    str | None,
    typer.Argument(
        metavar="rank=N|ROLE[N]|PID",
        help="A process of a debug run, such as driver or trainer0. May be left out where there is one.",
    ),
]


def resume(which: Which = None, everything: Everything = False, address: Address = None) -> None:
    """Let a stopped process go on, as if nobody had asked it to stop.

    One that somebody is attached to is let go by its client.
    """
    from vime.debug.attach import sessions
    from vime.debug.stop.records import WAITING, release

    if (which is None) == (not everything):
        raise UsageError("which stop? a key, rank=N or a role; or --all", "vime debug-attach list")
    seen = sessions.look(address, which)
    meant = _meant(seen, which)
    waiting = [stop for stop in meant if stop.state == WAITING]
    for stop in waiting:
        release(seen.session_of(stop).registry, [stop])
        output.say(f"{stop.who} ({stop.key}) goes on")
    attached = [stop for stop in meant if stop.state != WAITING]
    text = [f"{stop.who} ({stop.key}) is attached to: its client must let it go on" for stop in attached]
    if text:
        raise UsageError("\n".join(text), "continue or detach there")
    if not waiting:
        output.say("nothing is stopped")


def _meant(seen: Seen, which: str | None) -> list[Stop]:
    """Stops of one debug run: those of another are somebody's who may be looking at them."""
    from vime.debug.attach import sessions

    runs = {stop.session for stop in seen.stops}
    if which is None and len(runs) > 1:
        listed = "\n".join(f"  {name}\n{sessions.candidates(_of(seen, name))}" for name in sorted(runs))
        raise UsageError(f"--all: {len(runs)} debug runs have stops, which one?\n{listed}", "name it: resume RUN")
    if which is None or which in runs:
        return seen.stops if which is None else _of(seen, which)
    return [sessions.find(seen.stops, which)]


def _of(seen: Seen, session: str) -> list[Stop]:
    return [stop for stop in seen.stops if stop.session == session]


def pause(whom: Whom = None, address: Address = None) -> None:
    """Stop a process of a debug run where it is now.

    How to attach to it is said, as by run. It stops in its main thread between two steps of Python: not
    inside a C call such as a collective.
    """
    from vime.debug.attach import listing, pausing, sessions

    seen = sessions.look(address)
    stop = pausing.pause(seen, whom)
    for line in listing.announcement(stop, seen.registry_of(stop.session)):
        output.say(line)
