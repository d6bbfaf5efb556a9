"""What an instrumented file calls before the statement of a point. Most calls must cost next to nothing."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType, FunctionType

from vime.debug.stop.identity import is_one_of, whoami
from vime.debug.stop.say import say, say_once
from vime.debug.stop.spec import Point, Who
from vime.debug.stop.targets import spec_here
from vime.reward.role import PID, when_introduced

_off: set[str] = set()
"""Points that do not stop here, or not any more."""
_not_mine: set[str] = set()
"""Those of ``_off`` that are for others: until this process says that it is somebody else."""
_inside: set[int] = set()
"""Threads that are at a point now."""
_lock = threading.Lock()
_num_introductions = 0


@dataclass
class _Watch:
    """state: of the process when ``is_mine`` was decided. is_claimed: this process is the first of all. told: what
    the registry knows, (the process is asked for, the condition was true). compiled: the condition where it stands.
    """

    point: Point
    condition: CodeType | None
    compiled: CodeType | None = None
    state: int = -1
    is_mine: bool = False
    count: int = 0
    is_claimed: bool = False
    is_failure_told: bool = False
    told: tuple[bool, bool] | None = None


def hit(point_id: str, condition: Callable[[], object] | None = None) -> None:
    """A point was reached, in the caller's frame. ``condition``: as a function that sees the caller's variables."""
    if point_id in _off or sys.is_finalizing():
        return
    watch = _watches.get(point_id)
    if watch is None:
        _off.add(point_id)
        return
    if (thread := threading.get_ident()) in _inside:
        return  # a point in what a stop itself needs
    _inside.add(thread)
    try:
        _consider(watch, sys._getframe(1), condition)
    except Exception as error:  # noqa: BLE001 - a fault of ours must not end the user's process
        _off.add(point_id)
        say(f"{watch.point.text} does not stop in process {os.getpid()}: {type(error).__name__}: {error}")
    finally:
        _inside.discard(thread)


hit._torchdynamo_disable = True  # type: ignore[attr-defined]
hit._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "a point of vime debug-attach: TORCH_COMPILE_DISABLE=1 runs the program without compiling it"
)


def is_ready() -> bool:
    """Loaded: an instrumented module can import ``hit``."""
    return True


def _consider(watch: _Watch, frame: FrameType, condition: Callable[[], object] | None) -> None:
    if watch.state != (state := _state()):
        watch.is_mine, watch.state = _is_selected(watch.point), state
    if not watch.is_mine:
        return _tell(watch, False, False)
    if not _holds(watch, frame, condition):
        return _tell(watch, True, False)
    if not _counts(watch):
        return _tell(watch, True, True)
    return _stop(watch, frame)


def _stop(watch: _Watch, frame: FrameType) -> None:
    from vime.debug.stop import pause

    if watch.point.who.is_first and not watch.is_claimed:
        watch.is_claimed = pause.claim(watch.point.id)
        if not watch.is_claimed:
            _off.add(watch.point.id)
            return _tell(watch, True, True)
    _tell(watch, True, True, is_stop=True)
    return pause.at_point(frame, watch.point)


def _tell(watch: _Watch, is_mine: bool, is_held: bool, is_stop: bool = False) -> None:
    """What is new of a point, for whoever asks at the end why nothing has stopped."""
    mine, held = watch.told or (False, False)
    news = (mine or is_mine, held or is_held)
    if news == watch.told and not is_stop:
        return
    watch.told = news
    spec = spec_here()
    if spec is not None:
        from vime.debug.stop import tally

        tally.note(spec, watch.point.id, whoami().name, is_mine, is_held, is_stop)


def _state() -> int:
    """A number that changes with who this process is."""
    distributed = sys.modules.get("torch.distributed")
    is_up = getattr(distributed, "is_initialized", None)
    return _num_introductions * 2 + bool(is_up is not None and is_up())


def _is_selected(point: Point) -> bool:
    if not point.who.roles and point.who.ranks is None:
        return True
    me = whoami()
    if is_one_of(me, point.who):
        return True
    if me.rank is None and point.who.ranks is not None and is_one_of(me, Who(point.who.roles)):
        ranks = ",".join(map(str, point.who.ranks))
        say_once(
            f"{point.text} was reached by {me.name} (pid {me.pid}), which has no rank: it is for rank {ranks}; "
            "--if EXPR chooses by what a process knows"
        )
    elif me.rank is not None or os.environ.get(PID) == str(me.pid):  # it has said who it is
        _off.add(point.id)
        _not_mine.add(point.id)
    return False


def _holds(watch: _Watch, frame: FrameType, condition: Callable[[], object] | None) -> bool:
    """Whether the condition is true here; one that raises is told once, and is not true."""
    if watch.condition is None:
        return True
    try:
        if isinstance(condition, FunctionType) and frame.f_code.co_flags & CO_OPTIMIZED:
            return bool(_nowhere(watch, condition)())
        return _evaluate(watch.condition, frame)
    except Exception as error:  # noqa: BLE001 - the user's expression; the run goes on
        if not watch.is_failure_told:
            watch.is_failure_told = True
            point = watch.point
            say(f"condition {point.condition!r} of {point.text} fails: {type(error).__name__}: {error}; it goes on")
        return False


def _nowhere(watch: _Watch, condition: FunctionType) -> FunctionType:
    """The same function, in no file: a client that is there already does not stop in it."""
    if watch.compiled is None:
        watch.compiled = condition.__code__.replace(co_filename=f"<condition of {watch.point.text}>")
    return FunctionType(watch.compiled, condition.__globals__, "condition", None, condition.__closure__)


def _evaluate(code: CodeType, frame: FrameType) -> bool:
    """In a module or the body of a class, whose variables are a dictionary as they are."""
    if any(isinstance(c, CodeType) for c in code.co_consts):  # a scope inside sees no locals of eval
        return bool(eval(code, {**frame.f_globals, **frame.f_locals}))
    return bool(eval(code, frame.f_globals, frame.f_locals))


def _counts(watch: _Watch) -> bool:
    """Count; whether this is the time to stop."""
    with _lock:
        if watch.point.id in _off:
            return False
        watch.count += 1
        if watch.count < watch.point.hit:
            return False
        if not watch.point.is_every:
            _off.add(watch.point.id)
        return True


def in_forked_child() -> None:
    """A forked child has reached nothing yet."""
    global _lock, _watches
    _lock = threading.Lock()
    _off.clear()
    _inside.clear()
    _not_mine.clear()
    _watches = _all_watches()


def _reconsider() -> None:
    """This process has said who it is."""
    global _num_introductions
    _num_introductions += 1
    _off.difference_update(_not_mine)
    _not_mine.clear()


def _all_watches() -> dict[str, _Watch]:
    spec = spec_here()
    found = {}
    for point in () if spec is None else spec.points:
        try:
            condition = compile(point.condition, f"<condition of {point.text}>", "eval") if point.condition else None
        except (SyntaxError, ValueError) as error:  # another Python than where it was checked
            say(f"condition {point.condition!r} of {point.text} is no expression here: {error}; it never stops")
            continue
        found[point.id] = _Watch(point, condition)
    return found


when_introduced.append(_reconsider)
_watches = _all_watches()
