"""What a debug run stops at. Written once by ``vime debug-attach run``, read by every process from its environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from vime.reward.breakpoints import DEBUG_SPEC

FORMAT, SCHEMA_VERSION = "vime-debug-spec", 1
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray's: what the driver of a submitted job finds in its environment."""
LOOPBACK = "127.0.0.1"
DEFAULT_WAIT_SECONDS = 30 * 60.0
DEFAULT_HOLD_SECONDS = 4 * 3600.0


@dataclass(frozen=True)
class Who:
    """Which processes stop.

    roles     empty: any. See ``vime.debug.stop.identity.ROLES``
    ranks     None: any
    is_first  only the first process of the whole run that gets there
    """

    roles: tuple[str, ...] = ()
    ranks: tuple[int, ...] | None = None
    is_first: bool = False


@dataclass(frozen=True)
class Point:
    """One place to stop at: a line of a file, or the first statement of a function.

    id         "p0", "p1", ...: in the order of the command line
    text       as the user gave it
    file       absolute path where the command was given; "" for a point given as MODULE:QUALNAME
    line       counts from 1; 0 for a function
    sha1       of the file as it was then: a worker's copy that differs is told of
    module     "pkg.mod", or "__main__"; "" for a point given as FILE:LINE
    qualname   "Class.method"; "" for a line
    condition  Python expression over the frame's names; "" for none
    hit        stop at the N-th time that all of the above holds
    is_every   stop every time from then on, not once
    """

    id: str
    text: str
    file: str = ""
    line: int = 0
    sha1: str = ""
    module: str = ""
    qualname: str = ""
    condition: str = ""
    who: Who = field(default_factory=Who)
    hit: int = 1
    is_every: bool = False


@dataclass(frozen=True)
class Spec:
    """One debug run.

    session         names the run in the registry, such as "d-3fa91c"
    post_mortem     which processes stop at an exception that nobody catches; None: none does
    max_stops       of a process, at exceptions
    wait_seconds    how long an unattended stop lasts
    hold_seconds    what vime's own time-outs and those of collectives are raised to, so that the others can wait
    host, ports     where a stopped process listens; (0, 0): any free port, else a range, both ends included
    working_dir     folder where the command was given: copies of its files elsewhere are found by their relative path
    folder          registry on this machine; or
    gcs             address of the cluster whose key-value store is the registry
    is_ray_debugger stop in Ray's own debugger, for its VS Code extension
    breakpoints     which processes stop at a ``breakpoint()`` of the program's own, each time
    """

    session: str
    points: tuple[Point, ...] = ()
    post_mortem: Who | None = None
    max_stops: int = 1
    wait_seconds: float = DEFAULT_WAIT_SECONDS
    hold_seconds: float = DEFAULT_HOLD_SECONDS
    host: str = LOOPBACK
    ports: tuple[int, int] = (0, 0)
    working_dir: str = ""
    folder: str = ""
    gcs: str = ""
    is_ray_debugger: bool = False
    breakpoints: Who = field(default_factory=Who)

    def dumps(self) -> str:
        """One line of JSON."""
        return json.dumps({"format": FORMAT, "schema_version": SCHEMA_VERSION, **asdict(self)})

    @classmethod
    def loads(cls, text: str) -> Spec:
        """ValueError where ``text`` is none that this version can read."""
        try:
            found = json.loads(text)
            if (found.pop("format"), found.pop("schema_version")) != (FORMAT, SCHEMA_VERSION):
                raise ValueError("another version of vime wrote it")
            points = tuple(Point(**row | {"who": _who(row["who"])}) for row in found.pop("points"))
            after = found.pop("post_mortem")
            found |= {"ports": tuple(found["ports"]), "breakpoints": _who(found["breakpoints"])}
            return cls(points=points, post_mortem=None if after is None else _who(after), **found)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{DEBUG_SPEC} is not readable: {error}") from error


def current(environment: Mapping[str, str] = os.environ) -> Spec | None:
    """The debug run that this process belongs to; None outside of one."""
    text = environment.get(DEBUG_SPEC)
    return None if not text else Spec.loads(text)


def _who(row: dict[str, Any]) -> Who:
    ranks = row["ranks"]
    return Who(tuple(row["roles"]), None if ranks is None else tuple(ranks), row["is_first"])
