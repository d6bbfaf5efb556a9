"""``python -m vime.debug.stop.runner [-m] TARGET ARGS...``: run a script or a module as Python would, with its points.

The target is ``__main__``, with its own ``sys.argv``, ``sys.path`` and exit code. When it has ended while something of
its debug run is still stopped, the process stays, for a limited time.
"""

from __future__ import annotations

import builtins
import os
import sys
from types import CodeType, ModuleType, TracebackType
from typing import NoReturn

EXIT_ERROR = 1
_OURS = (os.path.realpath(__file__), "<frozen runpy>")


def main(arguments: list[str]) -> None:
    """Run the target that the arguments name; raises what it raises, but for errors: those are printed, as Python does.

    SystemExit with the target's exit code.
    """
    from vime.debug.stop import boot
    from vime.debug.stop.linger import linger
    from vime.reward.role import PID, introduce

    if PID not in os.environ:  # else somebody of the run has started this, and it is a child
        introduce("driver")
    boot.install()
    try:
        _run(arguments)
    except KeyboardInterrupt:
        raise
    except SystemExit:
        linger()
        raise
    except BaseException as error:  # noqa: BLE001 - as Python itself: whatever it is, it is printed and ends the program
        _report(error)
        linger()
        _exit_with(EXIT_ERROR)
    linger()


def _run(arguments: list[str]) -> None:
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        _run_module(arguments[1], arguments[2:])
    elif arguments and not arguments[0].startswith("-"):
        _run_script(module, arguments[0], arguments[1:])
    else:
        sys.exit(f"vime debug: nothing to run: {' '.join(arguments)!r}; give a script, or -m MODULE")


def _run_module(name: str, arguments: list[str]) -> None:
    import runpy

    sys.argv[:] = ["-m", *arguments]
    _set_first_path(os.getcwd())
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _run_script(module: ModuleType, path: str, arguments: list[str]) -> None:
    sys.argv[:] = [path, *arguments]
    if os.path.isdir(path) or path.endswith((".zip", ".pyz")):
        sys.exit(f"vime debug: {path} is no script; give a file, or -m MODULE")
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    file = os.path.abspath(path)  # as Python has it, whatever is in sys.argv
    code = _code_of(file)
    module.__file__ = file
    module.__dict__["__cached__"] = None
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


def _report(error: BaseException) -> None:
    """As Python's own end would: through ``sys.excepthook``, without our frames at the bottom."""
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None and _is_ours(traceback):
        traceback = traceback.tb_next
    error.__traceback__ = traceback
    sys.excepthook(type(error), error, traceback)
    from vime.debug.stop.post_mortem import stop_at

    stop_at(error)  # once for each error: here as well, because the program may have a hook of its own


def _is_ours(traceback: TracebackType) -> bool:
    file = traceback.tb_frame.f_code.co_filename
    return file in _OURS or os.path.realpath(file) in _OURS


def _exit_with(code: int) -> NoReturn:
    sys.exit(code)


if __name__ == "__main__":
    from vime.debug.stop import runner  # as a module of its own: the target takes the place of __main__

    runner.main(sys.argv[1:])
