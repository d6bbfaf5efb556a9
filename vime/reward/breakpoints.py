"""Breakpoints that were left in a user's module neither stop nor end a run: they are ignored, and that is said (D16).

What counts is ``PYTHONBREAKPOINT``, which Python reads at every ``breakpoint()`` and every child process inherits. Ray
sets it in each process it connects, to a hook that waits for ever, or that fails where the process is no worker of
Ray's (D01); it is set back there. A run is a debug run under ``vime debug-attach run``, or where ``PYTHONBREAKPOINT``
names a hook of the user's.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

HOOK = "PYTHONBREAKPOINT"
IGNORED_HOOK = "vime.reward.breakpoints.ignored"
DEBUG_SPEC = "VIME_DEBUG_SPEC"
"""Set in every process of a run of ``vime debug-attach run``, see ``vime.debug.stop.spec``."""
RAY_DEBUG = "RAY_DEBUG"
RAY_POST_MORTEM = "RAY_DEBUG_POST_MORTEM"
GUIDES_POST_MORTEM = "RAY_DEBUG_POSTMORTEM"
"""As the debug guide spells it; Ray does not read it (case D02)."""
_ALIASES = {"ray.util.pdb": "ray.util.rpdb"}
_RESULTS = {"debugpy.listen": ("127.0.0.1", 0)}
"""What a call that is ignored returns instead of None."""
_said: set[str] = set()


@dataclass(frozen=True, slots=True)
class Ignored:
    """calls: names of functions to replace, such as "pdb.set_trace"; places: "FILE:LINE" already told to the user."""

    calls: tuple[str, ...] = ()
    places: tuple[str, ...] = ()


def is_debug_run() -> bool:
    """Whether this is a process of a debug run: ``PYTHONBREAKPOINT`` names a hook that is neither ours nor Ray's."""
    if os.environ.get(DEBUG_SPEC):
        return True
    hook = os.environ.get(HOOK, "")
    return hook not in ("", "0", IGNORED_HOOK) and not hook.startswith("ray.")


def held(seconds: float) -> float:
    """A limit on a wait for another process: in a debug run no shorter than what a stop may take there."""
    text = os.environ.get(DEBUG_SPEC)
    return seconds if not text else max(seconds, float(json.loads(text)["hold_seconds"]))


def is_ray_debug_run() -> bool:
    """Whether somebody asked for Ray's own debugger."""
    return os.environ.get(RAY_DEBUG) in ("1", "legacy") or os.environ.get(RAY_POST_MORTEM) == "1"


def ignore(what: Ignored = Ignored()) -> None:
    """From now on ``breakpoint()`` and ``what.calls`` do nothing in this process, but for one line per place.

    In a debug run they stay what they are; in one of ``vime debug-attach run`` only ``breakpoint()``, which stops there
    for a limited time: other debuggers would wait for ever, or for a terminal.
    """
    if is_debug_run():
        if os.environ.get(DEBUG_SPEC):
            _ignore_calls(what)
        return
    if os.environ.get(HOOK) != "0":
        os.environ[HOOK] = IGNORED_HOOK
    if not is_ray_debug_run():
        os.environ[RAY_DEBUG] = "0"  # what ray.util.rpdb looks at
    _ignore_calls(what)


def ignore_in_worker() -> None:
    """``ignore`` in an actor, unless Ray's debugger was asked for. Ray has set its own hook when it comes to this."""
    if not is_ray_debug_run() and not os.environ.get(DEBUG_SPEC):
        os.environ.pop(HOOK, None)
        ignore()


@contextmanager
def hook_kept() -> Iterator[None]:
    """What connects to Ray inside does not change what ``breakpoint()`` does here, unless Ray's debugger is wanted."""
    before = os.environ.get(HOOK)
    try:
        yield
    finally:
        if before is not None and not is_ray_debug_run():
            os.environ[HOOK] = before


def ignored(*_args: Any, **_options: Any) -> None:
    """Stands for ``breakpoint()``."""
    _say("breakpoint", sys._getframe(1))


def _ignored_call(name: str, result: object, *_args: Any, **_options: Any) -> object:
    _say(name, sys._getframe(1))
    return result


def _ignore_calls(what: Ignored) -> None:
    _said.update(what.places)
    for call in what.calls:
        _replace(call)


def _say(name: str, frame: Any) -> None:
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    if place not in _said:
        _said.add(place)
        when = "in a debug run; breakpoint() stops" if os.environ.get(DEBUG_SPEC) else "outside debug runs"
        print(f"warning: {name}() in {place} is ignored {when}", file=sys.stderr, flush=True)


def _replace(call: str) -> None:
    name, _, attribute = call.rpartition(".")
    try:
        module = importlib.import_module(_ALIASES.get(name, name))
    except ImportError:
        return  # then the user's own import fails as well, and says so
    function: Callable[..., object] = partial(_ignored_call, call, _RESULTS.get(call))
    setattr(module, attribute, function)
