"""What this process has noted of its stops in the registry, kept true while a client is attached, and taken back."""

from __future__ import annotations

import atexit
import os
import threading
import time
from dataclasses import dataclass, field, replace

from vime.debug.stop import tracing
from vime.debug.stop.records import ATTACHED, RUNNING, WAITING, Stop, forget_stop, put_stop
from vime.debug.stop.registry import Registry
from vime.debug.stop.say import say
from vime.errors import VimeError

CLIENT_SECONDS = 0.2
"""Between two looks at who is attached."""


@dataclass
class _Open:
    """A stop that is noted, its thread, and whether the client was given its frame."""

    stop: Stop
    thread: threading.Thread
    is_handed_over: bool = False


@dataclass
class _State:
    """Of this process. ``open``: by key; ``keeper`` looks after them."""

    lock: threading.RLock = field(default_factory=threading.RLock)  # a signal stops the thread that holds it
    registry: Registry | None = None
    open: dict[str, _Open] = field(default_factory=dict)
    keeper: threading.Thread | None = None


_state = _State()


def note(registry: Registry, stop: Stop) -> None:
    """This thread has stopped; in place of what it has noted before, which a client that is still there was shown."""
    thread = threading.current_thread()
    with _state.lock:
        old = [o.stop for o in _state.open.values() if o.thread is thread and o.stop.key != stop.key]
        for other in old:
            del _state.open[other.key]
        _state.open[stop.key] = _Open(stop, thread)
        _state.registry = registry
    for other in old:
        forget_stop(registry, other)
    put_stop(registry, stop)


def forget(registry: Registry, stop: Stop) -> None:
    """It goes on."""
    with _state.lock:
        _state.open.pop(stop.key, None)
    forget_stop(registry, stop)


def handed_over(stop: Stop) -> None:
    """Its client has the frame."""
    with _state.lock:
        if stop.key in _state.open:
            _state.open[stop.key].is_handed_over = True


def in_forked_child() -> None:
    """A forked child has no stop and no connection of its own yet."""
    global _state
    _state = _State()


def keep() -> None:
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
