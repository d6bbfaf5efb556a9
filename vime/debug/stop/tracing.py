"""What is asked of debugpy: listen, hand over a frame, and be gone without a trace when the client is.

debugpy leaves Python's tracing on when its client has gone: everything then runs about eight times slower.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from vime.errors import VimeError

SPEC = "VIME_DEBUG_SPEC"
_SUSPENDED = 2
"""pydevd's number for a thread that its client holds."""
_NUM_ROUNDS = 10
_ROUND_SECONDS = 0.05
_lock = threading.RLock()
_endpoint: list[tuple[str, int]] = []
_clients: set[int] = set()
"""This process, once a client was seen in it."""
_set_trace = sys.settrace
"""Python's own: debugpy puts one in its place that complains."""


def listen(host: str, ports: tuple[int, int] = (0, 0)) -> tuple[str, int]:
    """Where a client finds this process; opened at the first call. VimeError where no port of the range is free."""
    with _lock:
        if not _endpoint and is_client_connected():
            return host, 0  # a debugger that the user has started the process with: it is shown the stop
        if not _endpoint:
            debugpy = _debugpy()
            # debugpy would make every child of this process wait for its client; its adapter is no process of the run
            environment = {name: value for name, value in os.environ.items() if name != SPEC}
            debugpy.configure(subProcess=False, pythonEnv=environment)
            _endpoint.append(_open(debugpy, host, range(ports[0], ports[1] + 1)))
            _hide_ourselves(debugpy)
        return _endpoint[0]


def _debugpy() -> Any:
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    try:
        import debugpy
    except ImportError as error:
        raise VimeError(f"debugpy cannot be imported here: {error}", "pip install debugpy") from error
    return debugpy


def _hide_ourselves(debugpy: Any) -> None:
    """Frames of ours are neither shown nor stopped in: a thread that waits in them stops where its own point is."""
    import pydevd
    from _pydevd_bundle.pydevd_api import PyDevdAPI

    folders = tuple(os.path.dirname(os.path.realpath(file)) for file in (debugpy.__file__, __file__))
    PyDevdAPI().set_dont_trace_start_end_patterns(pydevd.get_global_debugger(), folders, ("debugpy_launcher.py",))


def _open(debugpy: Any, host: str, ports: range) -> tuple[str, int]:
    why: object = ""
    for port in ports:
        if port and not _is_free(host, port):
            continue
        try:
            found = debugpy.listen((host, port))
            return str(found[0]), int(found[1])
        except RuntimeError as error:  # taken meanwhile
            why = error
    if ports == range(1):
        raise VimeError(f"no debug port could be opened on {host}: {why}")
    raise VimeError(f"no debug port: all of {ports[0]}-{ports[-1]} on {host} are taken", "give more ports")


def _is_free(host: str, port: int) -> bool:
    """Asked first: debugpy starts a process for every port that it tries."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def is_client_connected() -> bool:
    """Whether somebody has attached, and is there still."""
    module = sys.modules.get("pydevd")
    is_there = module is not None and bool(module._is_attached())
    if is_there:
        _clients.add(os.getpid())
    return is_there


def stop_at(frame: FrameType) -> None:
    """The client is shown the frame at its next line."""
    import pydevd

    with _lock:
        pydevd.settrace(suspend=True, trace_only_current_thread=True, patch_multiprocessing=False, stop_at_frame=frame)


def stop_at_error(error: BaseException, traceback: TracebackType, frame: FrameType) -> None:
    """The client is shown a frame that has ended with an error, as it was. Returns when it is let go."""
    import pydevd

    debugger, thread = pydevd.get_global_debugger(), threading.current_thread()
    info = debugger.set_additional_thread_info(thread)
    info.is_tracing += 1
    try:  # not by the client's choice of exceptions: it may have chosen none
        debugger.do_stop_on_unhandled_exception(thread, frame, {}, (type(error), error, traceback))
    finally:
        info.is_tracing -= 1


def is_suspended(thread: threading.Thread) -> bool:
    """Whether a client has stopped it."""
    info = getattr(thread, "additional_info", None)
    return info is not None and info.pydev_state == _SUSPENDED


def is_held(thread: threading.Thread) -> bool:
    """The same, or it is to stop, or in the middle of a step."""
    info = getattr(thread, "additional_info", None)
    return info is not None and (info.pydev_state == _SUSPENDED or info.pydev_step_cmd != -1)


def own_thread(target: Callable[[], None]) -> threading.Thread:
    """A thread that goes on while a client holds the others, and does not keep the process alive."""
    thread = threading.Thread(target=target, name="vime debug", daemon=True)
    thread.pydev_do_not_trace = True  # type: ignore[attr-defined]
    thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
    return thread


def end_if_alone() -> None:
    """Switch tracing off in all threads, where no client is connected."""
    if "pydevd" not in sys.modules:
        return
    # a thread that a client has held comes back from debugpy a little later, tracing
    for _ in range(_NUM_ROUNDS if _clients else 1):
        with _lock:
            if is_client_connected():
                return
            _end()
        if _clients:
            time.sleep(_ROUND_SECONDS)


def _end() -> None:
    import pydevd_tracing

    pydevd_tracing.restore_sys_set_trace_func()
    threading.settrace(None)  # type: ignore[arg-type]
    for frame in list(sys._current_frames().values()):
        _untrace_frames(frame)
    pydevd_tracing.set_trace_to_threads(_untraced, create_dummy_thread=False)
    _set_trace(None)


def _untraced(_frame: FrameType, _event: str, _argument: object) -> None:
    """Takes the place of debugpy's trace function in each thread: the next call there ends it."""
    _set_trace(None)


def _untrace_frames(frame: FrameType | None) -> None:
    while frame is not None:
        frame.f_trace = None
        frame = frame.f_back


def in_forked_child() -> None:
    """The parent's port, client and tracing are none of the child's."""
    global _lock
    _lock = threading.RLock()
    was_listening = bool(_endpoint)
    _endpoint.clear()
    _clients.clear()
    if not was_listening and "pydevd" not in sys.modules:
        return
    import pydevd
    from debugpy.server import api

    pydevd.settrace_forked(setup_tracing=False)
    api.listen.called = False
    threading.settrace(None)  # type: ignore[arg-type]
    _set_trace(None)
    _untrace_frames(sys._getframe())
