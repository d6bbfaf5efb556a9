"""``python -m vime.debug.stop.runner [-m] TARGET ARGS...``: run a script or a module as Python would, with its points.

The target is ``__main__``, with its own ``sys.argv``, ``sys.path`` and exit code. When it has ended while something of
its debug run is still stopped, the process stays, for a limited time.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any

_ME, _PID = os.path.realpath(__file__), os.getpid()
_STOPS = [os.path.join(os.path.dirname(_ME), name) for name in ("hit.py", "pause.py")]


def main(arguments: list[str]) -> None:
    """Run the target that the arguments name; raises what it raises, which Python itself then prints."""
    from vime.debug.stop import boot
    from vime.reward.role import PID, introduce

    if PID not in os.environ:  # else somebody of the run has started this, and it is a child
        introduce("driver")
    boot.install()
    try:
        _run(arguments)
    except SystemExit:
        _linger()
        raise
    except BaseException:
        sys.excepthook = _at_end(sys.excepthook)
        raise
    _linger()


def _run(arguments: list[str]) -> None:
    module = ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = module
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        _run_module(arguments[1], arguments[2:])
    elif arguments and not arguments[0].startswith("-"):
        _run_path(module, arguments[0], arguments[1:])
    else:
        sys.exit(f"vime debug: nothing to run: {' '.join(arguments)!r}; give a script, or -m MODULE")


def _run_module(name: str, arguments: list[str]) -> None:
    import runpy

    sys.argv[:] = ["-m", *arguments]
    _set_first_path(os.getcwd())
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _run_path(module: ModuleType, path: str, arguments: list[str]) -> None:
    sys.argv[:] = [path, *arguments]
    file = os.path.join(os.getcwd(), path)  # as Python has it, whatever is in sys.argv
    if os.path.isdir(path) or path.endswith((".zip", ".pyz")):
        _run_folder(file)
    else:
        _set_first_path(os.path.dirname(os.path.realpath(path)))
        _run_script(module, file)


def _run_folder(path: str) -> None:
    """Of the ``__main__`` inside; also a zip file's."""
    import runpy

    if sys.flags.safe_path:
        sys.path.insert(0, path)
    else:
        sys.path[0] = path
    runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]


def _run_script(module: ModuleType, file: str) -> None:
    code = _code_of(file)
    module.__dict__.update(__file__=file, __cached__=None, __loader__=SourceFileLoader("__main__", file))
    exec(code, module.__dict__)


def _code_of(path: str) -> CodeType:
    from vime.debug.stop import boot

    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        why = f"[Errno {error.errno}] {error.strerror}"  # as Python says it
        print(f"{sys.executable}: can't open file {path!r}: {why}", file=sys.stderr)
        sys.exit(2)
    code = boot.code_with_points("__main__", path)
    return compile(source, path, "exec", dont_inherit=True) if code is None else code


def _set_first_path(folder: str) -> None:
    """In place of the folder that ``-m`` has put there for ourselves."""
    if not sys.flags.safe_path and sys.path:
        sys.path[0] = folder


def _at_end(hook: Callable[..., Any]) -> Callable[..., Any]:
    """``sys.excepthook`` for the error that ends the target: its own, without our frames at the bottom; then stay."""

    def at_error(kind: Any, error: BaseException, traceback: TracebackType | None) -> None:
        traceback = _without_ours(traceback)
        error = error.with_traceback(traceback)  # some may not be assigned to, such as a frozen dataclass
        try:
            hook(kind, error, traceback)
        finally:
            if not isinstance(error, KeyboardInterrupt):  # it waits for nothing
                _stay(error)

    return at_error


def _stay(error: BaseException) -> None:
    from vime.debug.stop.post_mortem import stop_at

    stop_at(error)  # once for each error: here as well, because the program may have a hook of its own
    _linger()


def _linger() -> None:
    from vime.debug.stop.linger import linger

    if os.getpid() == _PID:  # a forked child is not the main program
        linger()


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    entry, found = traceback, traceback
    while entry is not None:
        if os.path.realpath(entry.tb_frame.f_code.co_filename) == _ME:
            found = entry.tb_next
        entry = entry.tb_next
    return _up_to_stop(found)


def _up_to_stop(traceback: TracebackType | None) -> TracebackType | None:
    """Ctrl-C while it is stopped: the program was at its own line."""
    last, entry = None, traceback
    while entry is not None:
        if last is not None and os.path.realpath(entry.tb_frame.f_code.co_filename) in _STOPS:
            last.tb_next = None
            break
        last, entry = entry, entry.tb_next
    return traceback


if __name__ == "__main__":
    from vime.debug.stop import runner  # as a module of its own: the target takes the place of __main__

    runner.main(sys.argv[1:])
