"""``vime debug-attach connect``"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from vime.errors import UsageError
from vime_cli import output
from vime_cli.debug_list import Address

if TYPE_CHECKING:
    from vime.debug.attach.sessions import Seen
    from vime.debug.stop.records import Stop

STDOUT = "-"
DEFAULT_FILE = "default"
Which = Annotated[
    str | None,
    typer.Argument(
        metavar="KEY|rank=N|ROLE",
        help="A stop as list shows it: its key or the beginning of that, rank=N, or a role such as driver. "
        "May be left out where there is one.",
    ),
]
InTerminal = Annotated[
    bool, typer.Option("--terminal", help="A debugger in this terminal (the default on a terminal).")
]
Forward = Annotated[
    int | None,
    typer.Option(
        "--forward", metavar="[PORT]", help="Bring the port of a stop on another node here, through Ray, until Ctrl-C.",
        min=0, max=65535, show_default=False,
    ),
]  # fmt: skip
LaunchJson = Annotated[
    str | None,
    typer.Option(
        "--launch-json",
        metavar="[FILE]",
        help="Write entries for VS Code, of all stops or of this one (.vscode/launch.json); -: print them.",
    ),
]


class WithOptionalValues(TyperCommand):
    """``--forward`` and ``--launch-json`` may stand without their value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_values(args))


def with_values(args: Sequence[str]) -> list[str]:
    """``args`` with the values that may be left out."""
    found = []
    for number, arg in enumerate(args):
        following = args[number + 1] if number + 1 < len(args) else ""
        found.append(arg)
        if arg == "--forward" and not following.isdigit():
            found.append("0")
        if arg == "--launch-json" and following != STDOUT and not following.endswith(".json"):
            found.append(DEFAULT_FILE)
    return found


def connect(
    which: Which = None,
    terminal: InTerminal = False,
    forward: Forward = None,
    launch_json: LaunchJson = None,
    address: Address = None,
) -> None:
    """Attach to a process that has stopped: here, or with an editor.

    Whether its port can be reached is tried first. Without an option: a debugger in this terminal (help lists its
    commands); where there is no terminal, host and port and an entry for VS Code.
    """
    from vime.debug.attach import sessions

    if sum((terminal, forward is not None, launch_json is not None)) > 1:
        raise UsageError("--terminal, --forward and --launch-json do not go together", "choose one")
    seen = sessions.look(address, which)
    if launch_json is not None and which is None:
        _write_entries(seen.stops, launch_json)
        return
    try:
        stop = _the_stop(seen, which)
    except UsageError:
        output.warn(seen.notes)  # it may be where nobody could look
        raise
    if which is not None and stop.key != which:
        output.warn(seen.notes)
    if launch_json is not None:
        _write_entries([stop], launch_json)
    elif forward is not None:
        _forward(seen, stop, forward)
    elif terminal or (sys.stdin.isatty() and output.is_terminal()):
        _in_terminal(seen, stop)
    else:
        _describe(stop)


def _the_stop(seen: Seen, which: str | None) -> Stop:
    from vime.debug.attach import sessions

    stops = seen.stops
    if which is not None:
        return sessions.find(stops, which)
    if not stops:
        raise UsageError("nothing is stopped", "vime debug-attach list")
    if len(stops) > 1:
        raise UsageError(f"{len(stops)} stops, which one?\n{sessions.candidates(stops)}", "give a key or rank=N")
    return stops[0]


def _write_entries(stops: Sequence[Stop], file: str) -> None:
    from vime.debug.attach import launch_json
    from vime.debug.attach.words import short_path

    if not stops:
        raise UsageError("nothing is stopped: there is nothing to attach to", "vime debug-attach list")
    new = launch_json.snippet(stops)
    if file == STDOUT:
        output.text(launch_json.text(new))
        return
    target = launch_json.DEFAULT if file == DEFAULT_FILE else Path(file)
    try:
        launch_json.merge(target, new)
    except launch_json.NotPlain:
        output.text(launch_json.text(new))
        raise
    names = ", ".join(entry["name"] for entry in new["configurations"])
    output.say(f"wrote {short_path(str(target))}: {names}; choose one under Run and Debug")


def _forward(seen: Seen, stop: Stop, port: int) -> None:
    from vime.debug.attach import launch_json
    from vime.debug.attach.tunnel import tunnel

    with tunnel(stop, _cluster_of(seen, stop), port) as way:
        output.say(f"127.0.0.1:{way.port} leads to {stop.who} ({stop.key}) on {stop.hostname}, until Ctrl-C")
        output.text(launch_json.text(launch_json.snippet([stop], {stop.key: way.port})))
        try:
            while not way.is_gone():
                threading.Event().wait(1.0)
        except KeyboardInterrupt:
            output.say("closed")
            return
        output.say(f"closed: {stop.key} does not answer any more{f' ({way.error})' if way.error else ''}")


def _in_terminal(seen: Seen, stop: Stop) -> None:
    from vime.debug.attach import reach
    from vime.debug.attach.sessions import is_here
    from vime.debug.attach.tunnel import tunnel

    if is_here(stop) or not seen.address:
        reach.check(stop)
        _debug(stop, stop.host, stop.port)
        return
    with tunnel(stop, _cluster_of(seen, stop)) as way:
        _debug(stop, "127.0.0.1", way.port)


def _debug(stop: Stop, host: str, port: int) -> None:
    from vime.debug.attach import launch_json
    from vime.debug.attach.dap import Dap
    from vime.debug.attach.listing import place
    from vime.debug.attach.terminal import Terminal
    from vime_cli.debug_screen import ConsoleScreen

    output.say(f"{stop.who}, pid {stop.pid}, {place(stop)}: {stop.reason} (help lists the commands)")
    Terminal(Dap(host, port), ConsoleScreen(), tuple(launch_json.path_mappings(stop))).run()


def _cluster_of(seen: Seen, stop: Stop) -> str:
    """UsageError where the stop is known to this machine alone: there is nothing to go through."""
    where = seen.session_of(stop).registry.where
    if where != seen.address:
        raise UsageError(
            f"{stop.key} is on this machine, at {stop.host}:{stop.port}: no tunnel is needed",
            "attach to that, or --terminal",
        )
    return seen.address


def _describe(stop: Stop) -> None:
    from vime.debug.attach import launch_json, reach

    reach.check(stop)
    output.text(f"{stop.host}:{stop.port}\n")
    output.text(launch_json.text(launch_json.snippet([stop])))
