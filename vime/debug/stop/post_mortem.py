"""Stops at errors that nobody catches: in the frame of the user's that raised, with its locals as they were."""

from __future__ import annotations

import os
import sys
import traceback
from types import TracebackType
from typing import Any

from vime.debug.stop import pause, tracing
from vime.debug.stop.identity import is_one_of, whoami
from vime.debug.stop.say import say
from vime.debug.stop.spec import Spec
from vime.debug.stop.targets import is_library, spec_here
from vime.reward.function import is_vimes

_MARK = "__vime_stopped__"
_num_stops = [0]


def stop_at(error: BaseException, *, is_printed: bool = True) -> bool:
    """Stop at an error, if the debug run asks for it and this process is meant; True if a client has looked at it.

    Public: for code that catches an error itself and ends the process with a message. ``is_printed``: the user has
    seen it; if not it is printed here, before anything stops.
    """
    try:
        return _stop_at(error, is_printed)
    except Exception as fault:  # noqa: BLE001 - a fault of ours must not take the place of the user's error
        say(f"process {os.getpid()} goes on without a stop: {type(fault).__name__}: {fault}")
        return False


def _stop_at(error: BaseException, is_printed: bool) -> bool:
    spec = spec_here()
    place = None if spec is None else _users(error.__traceback__)
    if spec is None or place is None or not _is_due(spec, error):
        return False
    vars(error)[_MARK] = True  # also of one that may not be changed, such as a frozen dataclass
    _num_stops[0] += 1
    if not is_printed:
        traceback.print_exception(error, file=sys.stderr)
    part, line = _up_to(error.__traceback__, place), place.tb_lineno
    frame = place.tb_frame
    reason = f"{type(error).__name__}: {_text_of(error)}".splitlines()[0][:200].removesuffix(": ")
    here = pause.Here(frame, line, reason, pause.POST_MORTEM, lambda: tracing.stop_at_error(error, part, frame))
    return pause.stop_here(here)


def patch_ray(module: Any) -> None:
    """Errors of tasks and of methods of actors: Ray asks these two functions of ``ray.util.rpdb`` about each."""
    module._is_ray_debugger_post_mortem_enabled = _is_asked_for
    module._post_mortem = _at_ray_error


def patch_reward_worker(module: Any) -> None:
    """Errors of reward functions, which the worker answers with one line."""
    module.on_error.append(lambda error: stop_at(error, is_printed=False))


def in_forked_child() -> None:
    """A forked child has stopped at nothing yet."""
    _num_stops[0] = 0


def _is_asked_for() -> bool:
    return True


def _at_ray_error() -> None:
    error = sys.exc_info()[1]
    if error is not None:
        stop_at(error, is_printed=False)


def _is_due(spec: Spec, error: BaseException) -> bool:
    who = spec.post_mortem
    if who is None or not isinstance(error, Exception) or _MARK in vars(error) or _num_stops[0] >= spec.max_stops:
        return False
    return is_one_of(whoami(), who) and (not who.is_first or pause.claim(pause.POST_MORTEM))


def _users(top: TracebackType | None) -> TracebackType | None:
    """The innermost frame of the user's, else of vime's; of a process with a part in the run, such as vLLM's engine
    core, else any. None in what libraries start for themselves.
    """
    entries = []
    while top is not None:
        entries.append(top)
        top = top.tb_next
    users = [e for e in entries if not is_library(e.tb_frame.f_code.co_filename)]
    others = [e for e in users if not is_vimes(e.tb_frame.f_code.co_filename)]
    has_part = whoami().role not in ("driver", "worker", "child")
    return next(reversed(others or users or (entries if has_part else [])), None)


def _up_to(top: TracebackType | None, last: TracebackType) -> TracebackType:
    """The traceback without what is below ``last``: its frame is then the one that a client is shown."""
    entries = []
    while top is not None and top is not last:
        entries.append(top)
        top = top.tb_next
    found = TracebackType(None, last.tb_frame, last.tb_lasti, last.tb_lineno)
    for entry in reversed(entries):
        found = TracebackType(found, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return found


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the user's own __str__, which Python's traceback survives as well
        return "<str() failed>"
