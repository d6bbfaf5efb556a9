"""Taken up by every Python process of a debug run, through PYTHONPATH; then the ``sitecustomize`` it stands before.

It also meets interpreters that have no vime, or are too old for it: those go on as if it were not there.
"""

import os
import sys


def _boot():
    if not os.environ.get("VIME_DEBUG_SPEC") or sys.version_info < (3, 11):
        return
    try:
        from vime.debug.stop import boot

        boot.install(is_start=True)
    except Exception as error:  # noqa: BLE001 - whatever it is, the process is the user's and goes on
        if isinstance(error, ModuleNotFoundError) and error.name == "vime":
            return
        sys.stderr.write(f"vime debug: no points in process {os.getpid()}: {type(error).__name__}: {error}\n")


def _chain():
    """Run the one that Python would have found without us, under its own name."""
    from importlib.machinery import PathFinder

    here = os.path.dirname(os.path.realpath(__file__))
    others = [path for path in sys.path if os.path.realpath(path or ".") != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_boot()
_chain()
