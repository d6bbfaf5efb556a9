"""``vime debug-attach resume`` and ``vime debug-attach pause``"""

from __future__ import annotations

from typing import Annotated

import typer

from vime.errors import UsageError
from vime_cli import output
from vime_cli.debug_list import Address

Which = Annotated[
    str | None,
    typer.Argument(
        metavar="KEY|rank=N|ROLE",
        help="A stop as list shows it: its key or the beginning of that, rank=N, or a role such as driver.",
    ),
]
Everything = Annotated[bool, typer.Option("--all", help="All stops that nobody is attached to.")]
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
    meant = seen.stops if which is None else [sessions.find(seen.stops, which)]
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
