"""What each process notes of a point once it gets there, and of other stops: the end of a debug run tells of both.

One entry per process and point, written when something is new: nothing before a point is reached, and nothing for the
thousandth time that its condition does not hold.
"""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass, replace

from vime.debug.stop.registry import Registry, registry_here, rows
from vime.debug.stop.say import say_once
from vime.debug.stop.spec import Spec

KIND = "tally"


@dataclass(frozen=True)
class Tally:
    """Of one process.

    is_selected  --rank and --role ask for it
    is_held      the condition was true once
    num_stops    how often it stopped
    """

    point: str
    who: str
    pid: int
    hostname: str
    is_selected: bool = False
    is_held: bool = False
    num_stops: int = 0


_mine: dict[str, Tally] = {}


def note(spec: Spec, point: str, who: str, is_selected: bool, is_held: bool, is_stop: bool = False) -> None:
    """This process has reached a point. Written where that says something new; what fails is said once, and no more."""
    before = _mine.get(point)
    if before is None or before.pid != os.getpid():
        before = Tally(point, who, os.getpid(), socket.gethostname(), num_stops=-1)
    after = replace(
        before,
        who=who,
        is_selected=before.is_selected or is_selected,
        is_held=before.is_held or is_held,
        num_stops=max(before.num_stops, 0) + is_stop,
    )
    if after == before:
        return
    _mine[point] = after
    try:
        registry_here(spec).put(f"{spec.session}/{KIND}/{point}/{after.hostname}-{after.pid}", asdict(after))
    except Exception as error:  # noqa: BLE001 - a fault of ours must not end the user's process
        say_once(f"that {who} has reached {point} is not noted: {error}")


def tallies(registry: Registry, session: str) -> list[Tally]:
    """Of all processes of a debug run."""
    return [Tally(**value) for _, value in rows(registry, f"{session}/{KIND}/")]
