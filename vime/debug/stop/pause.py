"""A stop: open a debug port on loopback, say so, wait a limited time, and hand the frame to whoever has attached.

Whatever goes wrong here is told, and the user's process goes on.
"""

from __future__ import annotations

import atexit
import linecache
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import FrameType

from vime.debug.processes import Member
from vime.debug.stop import tracing
from vime.debug.stop.hold import note_group
from vime.debug.stop.identity import is_one_of, whoami
from vime.debug.stop.records import ATTACHED, RUNNING, WAITING, Stop, forget_stop, is_released, put_stop, run_of
from vime.debug.stop.registry import FolderRegistry, Registry, registry_of
from vime.debug.stop.say import duration, say, say_once
from vime.debug.stop.spec import Point, Spec
from vime.debug.stop.targets import roots_of, spec_here
from vime.errors import VimeError

BREAKPOINT, PAUSE, POST_MORTEM = "breakpoint()", "pause", "post-mortem"
POLL_SECONDS = 0.05
REGISTRY_SECONDS, CLIENT_SECONDS = 0.5, 0.2
"""Between two questions whether the stop was released, and between two looks at who is attached."""


@dataclass(frozen=True)
class Here:
    """A place to stop at. ``line``: that of the statement; ``hand_over``: called when a client is there."""

    frame: FrameType
    line: int
    reason: str
    point: str
    hand_over: Callable[[], None]


@dataclass
class _Open:
    """A stop that is noted, its thread, and whether the client was given its frame."""

    stop: Stop
    thread: threading.Thread
    is_handed_over: bool = False


@dataclass
class _State:
    """Of this process. ``open``: by key; ``keeper`` looks after them. ``inside``: threads that are at a stop.
    ``parents``: before the fork, never closed here, where the threads of its connection are missing.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)  # a signal stops the thread that holds it
    registry: Registry | None = None
    open: dict[str, _Open] = field(default_factory=dict)
    keeper: threading.Thread | None = None
    inside: set[int] = field(default_factory=set)
    parents: _State | None = None


_state = _State()


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
    if spec is None or thread in _state.inside or sys.is_finalizing():  # no thread of a debugger runs any more then
        return False
    _state.inside.add(thread)
    try:
        return _stop(spec, here)
    except VimeError as error:
        say(f"process {os.getpid()} goes on without a stop: {error.message}")
    except Exception as error:  # noqa: BLE001 - a fault of ours must not end the user's process
        say(f"process {os.getpid()} goes on without a stop: {type(error).__name__}: {error}")
    finally:
        _state.inside.discard(thread)
    return False


def claim(name: str) -> bool:
    """Whether this process is the first of the debug run at ``name``; a registry that fails is told, and answers no."""
    spec = spec_here()
    if spec is None:
        return False
    try:
        return _registry(spec).claim(f"{spec.session}/claim/{name}", {"pid": os.getpid()})
    except VimeError as error:
        say(f"process {os.getpid()} goes on without a stop: {error.message}")
        return False


def in_forked_child() -> None:
    """A forked child has no port, no stop and no connection of its own yet."""
    global _state
    _state = _State(parents=_state)
    tracing.in_forked_child()


def _stop(spec: Spec, here: Here) -> bool:
    with _endpoint_of(spec) as endpoint:
        stop = _record(spec, here, endpoint)
        registry = _registry(spec)
        is_attached = tracing.is_client_connected()
        _note(registry, replace(stop, state=ATTACHED) if is_attached else stop)
        _note_group(registry, stop)
        try:
            if not is_attached:
                is_attached = _wait(registry, stop)
        finally:
            if not is_attached:
                _forget(registry, stop)
                tracing.end_if_alone()
    if not is_attached:
        return False
    _note(registry, replace(stop, state=ATTACHED))
    _keep()
    here.hand_over()
    with _state.lock:
        if stop.key in _state.open:
            _state.open[stop.key].is_handed_over = True
    return True


def _endpoint_of(spec: Spec) -> AbstractContextManager[tuple[str, int]]:
    """Where this process listens, from now on; entered while it waits."""
    if spec.is_ray_debugger:
        from vime.debug.stop.ray_debugger import waiting

        return waiting(spec)
    with _state.lock:
        return nullcontext(tracing.listen(spec.host, spec.ports))


def _registry(spec: Spec) -> Registry:
    with _state.lock:
        if _state.registry is None:
            _state.registry = registry_of(spec)
        return _state.registry


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


def _note(registry: Registry, stop: Stop) -> None:
    """Also in place of what this thread has noted before: a client that is still there was shown that."""
    thread = threading.current_thread()
    with _state.lock:
        old = [o.stop for o in _state.open.values() if o.thread is thread and o.stop.key != stop.key]
        for other in old:
            del _state.open[other.key]
        _state.open[stop.key] = _Open(stop, thread)
    for other in old:
        forget_stop(registry, other)
    put_stop(registry, stop)


def _note_group(registry: Registry, stop: Stop) -> None:
    """Who waits for this process; a program whose groups cannot be asked stops all the same."""
    try:
        note_group(registry, stop)
    except Exception as error:  # noqa: BLE001 - torch's own, of whatever kind
        say(f"{stop.key}: who waits behind it is not known: {type(error).__name__}: {error}")


def _forget(registry: Registry, stop: Stop) -> None:
    with _state.lock:
        _state.open.pop(stop.key, None)
    forget_stop(registry, stop)


def _keep() -> None:
    """Have a thread look after what is noted, until the client has gone."""
    with _state.lock:
        if _state.keeper is None or not _state.keeper.is_alive():
            atexit.unregister(_forget_all)  # to be called before what was registered since
            atexit.register(_forget_all)
            _state.keeper = tracing.own_thread(_keep_up_to_date)
            _state.keeper.start()


def _keep_up_to_date() -> None:
    registry = _state.registry
    try:
        left: list[Stop] | None = None
        while registry is not None and left is None:
            while tracing.is_client_connected():
                _renew(registry)
                time.sleep(CLIENT_SECONDS)
            tracing.end_if_alone()
            left = _left()
            for stop in left or ():
                forget_stop(registry, stop)
    except VimeError as error:
        tracing.end_if_alone()
        say(f"process {os.getpid()}: its stop stays noted: {error.message}")


def _left() -> list[Stop] | None:
    """Stops whose client has gone: nobody looks after them any more. None where the next client is there already."""
    with _state.lock:
        if tracing.is_client_connected():
            return None
        _state.keeper = None
        keys = [key for key, entry in _state.open.items() if entry.stop.state != WAITING]
        return [_state.open.pop(key).stop for key in keys]


def _forget_all() -> None:
    """The process ends, with a client or without."""
    for key, entry in list(_state.open.items()):
        _state.open.pop(key, None)
        if _state.registry is not None:
            try:
                forget_stop(_state.registry, entry.stop)
            except VimeError as error:
                say(f"{key} stays noted: {error.message}")


def _renew(registry: Registry) -> None:
    """Say of each stop whether the client has let its thread go on."""
    for key, entry in list(_state.open.items()):
        if entry.stop.state == WAITING:
            continue
        is_held = not entry.is_handed_over or tracing.is_held(entry.thread)
        state = ATTACHED if is_held else RUNNING
        if state != entry.stop.state and _state.open.get(key) is entry:
            entry.stop = replace(entry.stop, state=state)
            put_stop(registry, entry.stop)
