"""A stop: open a debug port on loopback, say so, wait a limited time, and hand the frame to whoever has attached.

Whatever goes wrong here is told, and the user's process goes on.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import FrameType

from vime.debug.processes import Member
from vime.debug.stop import noted, tally, tracing
from vime.debug.stop.hold import note_group
from vime.debug.stop.identity import is_one_of, whoami
from vime.debug.stop.records import ATTACHED, Stop, is_released, run_of
from vime.debug.stop.registry import FolderRegistry, Registry, registry_here
from vime.debug.stop.say import duration, say, say_once
from vime.debug.stop.spec import Point, Spec
from vime.debug.stop.targets import roots_of, spec_here
from vime.errors import VimeError

BREAKPOINT, PAUSE, POST_MORTEM = "breakpoint()", "pause", "post-mortem"
POLL_SECONDS = 0.05
REGISTRY_SECONDS = 0.5
"""Between two questions whether the stop was released."""


@dataclass(frozen=True)
class Here:
    """A place to stop at. ``line``: that of the statement; ``hand_over``: called when a client is there."""

    frame: FrameType
    line: int
    reason: str
    point: str
    hand_over: Callable[[], None]


_inside: set[int] = set()
"""Threads that are at a stop."""


def at_point(frame: FrameType, point: Point) -> None:
    """Stop in the caller's frame, before the statement that is next there."""
    reason = f"breakpoint {point.condition}".rstrip()
    stop_here(Here(frame, frame.f_lineno + 1, reason, point.id, lambda: tracing.stop_at(frame)))


def at_breakpoint(frame: FrameType) -> None:
    """Stop behind a ``breakpoint()``, in a process that is meant."""
    spec, me = spec_here(), whoami()
    if spec is not None and not is_one_of(me, spec.breakpoints):
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        say_once(f"{BREAKPOINT} at {where} does not stop in {me.name} (pid {me.pid}): others are asked for")
        return
    stop_here(Here(frame, frame.f_lineno, BREAKPOINT, BREAKPOINT, lambda: tracing.stop_at(frame)))


def at_signal(frame: FrameType) -> None:
    """Stop where the main thread is, unless it has stopped already."""
    if tracing.is_suspended(threading.main_thread()):
        return
    stop_here(Here(frame, frame.f_lineno, "paused by vime debug-attach pause", PAUSE, lambda: tracing.stop_at(frame)))


def stop_here(here: Here) -> bool:
    """True once a client has attached and has the frame; False where the process goes on without."""
    spec, thread = spec_here(), threading.get_ident()
    if spec is None or thread in _inside or sys.is_finalizing():  # no thread of a debugger runs any more then
        return False
    _inside.add(thread)
    try:
        return _stop(spec, here)
    except VimeError as error:
        say(f"process {os.getpid()} goes on without a stop: {error.message}")
    except Exception as error:  # noqa: BLE001 - a fault of ours must not end the user's process
        say(f"process {os.getpid()} goes on without a stop: {type(error).__name__}: {error}")
    finally:
        _inside.discard(thread)
    return False


def claim(name: str) -> bool:
    """Whether this process is the first of the debug run at ``name``; a registry that fails is told, and answers no."""
    spec = spec_here()
    if spec is None:
        return False
    try:
        return registry_here(spec).claim(f"{spec.session}/claim/{name}", {"pid": os.getpid()})
    except VimeError as error:
        say(f"process {os.getpid()} goes on without a stop: {error.message}")
        return False


def in_forked_child() -> None:
    """A forked child has no port, no stop and no connection of its own yet."""
    _inside.clear()
    noted.in_forked_child()
    tracing.in_forked_child()


def _stop(spec: Spec, here: Here) -> bool:
    with _endpoint_of(spec) as endpoint:
        stop = _record(spec, here, endpoint)
        registry = registry_here(spec)
        is_attached = tracing.is_client_connected()
        noted.note(registry, replace(stop, state=ATTACHED) if is_attached else stop)
        _note_group(registry, stop)
        if here.point in (BREAKPOINT, PAUSE, POST_MORTEM):  # of points, ``hit`` says so
            tally.note(spec, here.point, stop.who, is_selected=True, is_held=True, is_stop=True)
        try:
            if not is_attached:
                is_attached = _wait(registry, stop)
        finally:
            if not is_attached:
                noted.forget(registry, stop)
                tracing.end_if_alone()
    if not is_attached:
        return False
    noted.note(registry, replace(stop, state=ATTACHED))
    noted.keep()
    here.hand_over()
    noted.handed_over(stop)
    return True


def _endpoint_of(spec: Spec) -> AbstractContextManager[tuple[str, int]]:
    """Where this process listens, from now on; entered while it waits."""
    if spec.is_ray_debugger:
        from vime.debug.stop.ray_debugger import waiting

        return waiting(spec)
    return nullcontext(tracing.listen(spec.host, spec.ports))


def _record(spec: Spec, here: Here, endpoint: tuple[str, int]) -> Stop:
    me, process = whoami(), Member.here("")
    code, now = here.frame.f_code, time.time()
    local_root, remote_root = roots_of(code.co_filename)
    return Stop(
        key=f"{me.name.replace(' ', '')}-{os.urandom(2).hex()}",
        session=spec.session,
        point=here.point,
        reason=here.reason,
        file=os.path.normpath(code.co_filename),
        line=here.line,
        function=code.co_qualname,
        code=linecache.getline(code.co_filename, here.line, here.frame.f_globals).strip(),
        role=me.role,
        rank=me.rank,
        pid=me.pid,
        hostname=me.host,
        address=me.address,
        started=process.started,
        boot=process.boot,
        thread=threading.current_thread().name,
        host=endpoint[0],
        port=endpoint[1],
        since=now,
        until=now + spec.wait_seconds,
        actor=me.actor,
        job=me.job,
        node=me.node,
        local_root=local_root,
        remote_root=remote_root,
    )


def _wait(registry: Registry, stop: Stop) -> bool:
    """Until a client is there (True), or the stop is released, or its time is over."""
    left = stop.until - stop.since
    run = run_of(registry, stop.session)
    if run is None or not run.shares_terminal:
        cluster = "" if isinstance(registry, FolderRegistry) else f" --address {registry.where}"
        say(
            f"{stop.who} stopped at {stop.file}:{stop.line} in {stop.function} ({stop.reason}), pid {stop.pid} on "
            f"{stop.hostname}; attach: vime debug-attach connect {stop.key}{cluster}; "
            f"goes on by itself in {duration(left)}",
            is_announced=True,
        )
    end, next_question = time.monotonic() + left, 0.0
    while not tracing.is_client_connected():
        if time.monotonic() >= end:
            say(f"{stop.key}: nobody attached within {duration(left)}: {stop.who} goes on")
            return False
        if time.monotonic() >= next_question:
            next_question = time.monotonic() + REGISTRY_SECONDS
            if is_released(registry, stop):
                say(f"{stop.key}: {stop.who} was told to go on")
                return False
        time.sleep(POLL_SECONDS)
    return True


def _note_group(registry: Registry, stop: Stop) -> None:
    """Who waits for this process; a program whose groups cannot be asked stops all the same."""
    try:
        note_group(registry, stop)
    except Exception as error:  # noqa: BLE001 - torch's own, of whatever kind
        say(f"{stop.key}: who waits behind it is not known: {type(error).__name__}: {error}")
