"""Taken up at the start of every process of a debug run: from there on, files with points are compiled with them.

It must cost next to nothing: most processes never load such a file. So it imports nothing that Python has not loaded
already, but for json; what a point needs is loaded with the first file that has one.
"""

from __future__ import annotations

import os
import sys
from _thread import get_ident
from importlib import _bootstrap, import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, FrameType, ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

SPEC = "VIME_DEBUG_SPEC"
"""As in ``vime.reward.breakpoints``, which costs more to load than all this."""
MAIN = ("__main__", "__mp_main__")
_SIGUSR2 = 12 if sys.platform == "linux" else 31

_installed: set[int] = set()
_names: set[str] = set()
"""Modules and file names that may have points."""
_files: set[str] = set()
_busy: set[int] = set()
"""Threads that load what it needs to compile a file with points: not with points itself."""
_beside_ray: set[int] = set()
"""This process, if it was forked from one that had loaded Ray."""
_after: dict[str, Callable[[ModuleType], None]] = {}
"""What to do once a module has been loaded."""
_load = SourceFileLoader.get_code


def install(is_start: bool = False) -> None:
    """Once per process; nothing outside of a debug run. ``is_start``: Python has not begun with its program yet."""
    text = os.environ.get(SPEC)
    if not text or _installed:
        return
    _installed.add(os.getpid())
    import json

    try:
        spec = json.loads(text)
        points, is_post_mortem = spec["points"], spec["post_mortem"] is not None
        _names.update(p["module"] for p in points if p["module"])
        _files.update(os.path.basename(p["file"]) for p in points if p["file"])
    except (ValueError, KeyError, TypeError) as error:
        from vime.debug.stop.say import say

        say(f"no points in process {os.getpid()}: {SPEC} is not readable: {error}")
        return
    if points:
        if is_start:
            _run_main_with_points()
        _report_imported()
        SourceFileLoader.get_code = _get_code  # type: ignore[method-assign,assignment]
        _when_loaded("runpy", _patch_runpy)
    sys.breakpointhook = _breakpoint
    for module in ("pydevd", "debugpy._vendored.force_pydevd"):  # the second one has loaded the first
        _when_loaded(module, _take_breakpoint_back)
    os.environ["PYTHONBREAKPOINT"] = "vime.debug.stop.boot._breakpoint"
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        _when_loaded("ray._private.worker", lambda module: _call("worker", "patch_merge", module))
    os.register_at_fork(after_in_child=_in_forked_child)
    if is_post_mortem:
        _install_post_mortem()
    _install_signal()


def code_with_points(name: str, path: str) -> CodeType | None:
    """Code of a file that has points; None for others, which are loaded as ever."""
    is_main = name in MAIN and "__main__" in _names
    if (name not in _names and os.path.basename(path) not in _files and not is_main) or get_ident() in _busy:
        return None
    _busy.add(get_ident())
    try:
        code: CodeType | None = _call("targets", "code_of", name, path)
        return code if code is not None and _can_call_hit(name) else None
    finally:
        _busy.discard(get_ident())


def _can_call_hit(name: str) -> bool:
    """What the points of module ``name`` call is loaded before that module runs: what it needs itself has no points."""
    if "vime.debug.stop.hit" not in sys.modules:
        if _call("hit", "is_ready") is None:
            return False
        _report_imported(name)
    return True


def _call(module: str, function: str, *args: Any) -> Any:
    """A function of ours, loaded when it is needed. What goes wrong in it is told, and the user's process goes on."""
    if sys.is_finalizing():
        return None
    try:
        return getattr(import_module(f"vime.debug.stop.{module}"), function)(*args)
    except Exception as error:  # noqa: BLE001 - a fault of ours must not end the user's process
        from vime.debug.stop.say import say

        say(f"process {os.getpid()} goes on without a stop: {type(error).__name__}: {error}")
        return None


def _get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
    code = code_with_points(fullname, self.path)
    return _load(self, fullname) if code is None else code


# Python leaves the frames of an import out of a traceback, and tells them by their file.
_get_code.__code__ = _get_code.__code__.replace(co_filename=_load.__code__.co_filename)


def _run_main_with_points() -> None:
    """``python FILE`` reads its file without any loader: begin again, with the runner, where the file has points."""
    script = sys.argv[0] if sys.argv else ""
    index = len(sys.orig_argv) - len(sys.argv)
    is_file = script.endswith(".py") and index > 0 and sys.orig_argv[index] == script
    if not is_file or ("__main__" not in _names and os.path.basename(script) not in _files):
        return
    from vime.debug.stop.targets import points_of

    if points_of("__main__", script):
        options = sys.orig_argv[1:index]
        command = [sys.executable, *options, "-m", "vime.debug.stop.runner", *sys.orig_argv[index:]]
        os.execv(sys.executable, command)


def _report_imported(beside: str = "") -> None:
    """What was loaded before cannot have points any more: said, never silent. ``beside``: is being loaded now."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name in (*MAIN, beside) or not isinstance(file, str):
            continue
        if name in _names or os.path.basename(file) in _files:
            from vime.debug.stop.say import say
            from vime.debug.stop.targets import points_of

            for point in points_of(name, file):
                say(f"{point.text} never stops in process {os.getpid()}: {name} was imported before the points were")


class _AfterLoading:
    """A finder that finds nothing of its own: it has a function called when some module has been loaded."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _after:
            return None
        then = _after.pop(name)
        spec = _bootstrap._find_spec(name, path, target)  # type: ignore[attr-defined]
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, then)
        return spec


class _Loader:
    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader, self._then = loader, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then(module)


def _when_loaded(name: str, then: Callable[[ModuleType], None]) -> None:
    if name in sys.modules:
        then(sys.modules[name])
        return
    if not any(finder is _AfterLoading for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterLoading)  # type: ignore[arg-type]
    _after[name] = then


def _patch_runpy(runpy: Any) -> None:
    """A spawned child runs the file of its parent's main program again, as ``__mp_main__``, through this function."""
    load = runpy._get_code_from_file

    def get_code_from_file(*args: Any) -> Any:
        path = args[-1]
        code = code_with_points("__mp_main__", os.path.abspath(os.fsdecode(path)))
        if code is None:
            return load(*args)
        return (code, path) if len(args) == 2 else code  # one argument and result less from Python 3.12 on

    runpy._get_code_from_file = get_code_from_file


def _breakpoint(*_args: object, **_options: object) -> None:
    """Stands for ``breakpoint()``."""
    _call("pause", "at_breakpoint", sys._getframe(1))


def _take_breakpoint_back(_pydevd: ModuleType) -> None:
    """debugpy's own hook, set when it is loaded, ignores a ``breakpoint()`` while no client is there."""
    sys.breakpointhook = _breakpoint


def is_forked_beside_ray() -> bool:
    """Whether this process was forked from one that had loaded Ray, whose threads are missing here."""
    return bool(_beside_ray)


def _in_forked_child() -> None:
    if "ray._raylet" in sys.modules:
        _beside_ray.add(os.getpid())
    for name in ("vime.debug.stop.hit", "vime.debug.stop.pause", "vime.debug.stop.post_mortem"):
        if (module := sys.modules.get(name)) is not None:
            module.in_forked_child()


def _install_post_mortem() -> None:
    before = sys.excepthook

    def at_exception(kind: Any, error: BaseException, traceback: Any) -> None:
        before(kind, error, traceback)
        if isinstance(error, Exception):  # nothing is loaded for others: a Ctrl-C's exit code would be lost
            _call("post_mortem", "stop_at", error)

    sys.excepthook = at_exception
    _when_loaded("threading", _patch_threading)
    _when_loaded("ray.util.rpdb", lambda module: _call("post_mortem", "patch_ray", module))
    _when_loaded("vime.reward.worker", lambda module: _call("post_mortem", "patch_reward_worker", module))


def _patch_threading(threading: Any) -> None:
    """Errors that end a thread. Nothing of ours is imported yet: it may be one of ours that imports ``threading``."""
    before = threading.excepthook

    def at_exception(arguments: Any) -> None:
        before(arguments)
        if isinstance(arguments.exc_value, Exception):
            _call("post_mortem", "stop_at", arguments.exc_value)

    threading.excepthook = at_exception


def _install_signal() -> None:
    """SIGUSR2 pauses the process where it is, unless somebody has it already."""
    import _signal

    try:
        before = _signal.getsignal(_SIGUSR2)
        if before == _signal.SIG_DFL:
            _signal.signal(_SIGUSR2, _at_signal)
            return
    except ValueError:  # not the main thread: it has no say in signals
        return
    from vime.debug.stop.say import say

    say(f"process {os.getpid()} cannot be paused: its signal SIGUSR2 is taken by {before!r}")


def _at_signal(_number: int, frame: FrameType | None) -> None:
    if frame is not None:
        _call("pause", "at_signal", frame)
