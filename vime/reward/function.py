"""User functions by name: ``package.module:attribute``."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import vime
from vime.errors import UsageError
from vime.reward.breakpoints import ignore

LIBRARY_MARKS = ("/site-packages/", "/dist-packages/", "/lib/python3.")
"""In the paths of files that are no user's, whatever Python they belong to."""


def add_import_paths(import_paths: Sequence[str]) -> None:
    """Make the current folder and ``import_paths`` (say, that of run.toml) importable, before installed packages."""
    for path in reversed([os.getcwd(), *map(os.path.abspath, import_paths)]):
        if path not in sys.path:
            sys.path.insert(0, path)


def is_users(file: str) -> bool:
    """Whether a source file is the user's: no library, no part of Python, none of vime."""
    if not file.endswith(".py") or is_vimes(file) or any(mark in file for mark in LIBRARY_MARKS):
        return False
    return not os.path.realpath(file).startswith(_library_folders())


def is_vimes(file: str) -> bool:
    """Whether a source file is vime's own."""
    return file.startswith(_own_folders())


@cache
def _own_folders() -> tuple[str, str]:
    root = str(Path(vime.__file__).parent)
    return root + os.sep, f"{root}_cli{os.sep}"


@cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({os.path.join(os.path.realpath(paths[k]), "") for k in ("stdlib", "platstdlib", "purelib", "platlib")})


def load_function(spec: str, field: str, *, num_arguments: int, import_paths: Sequence[str] = ()) -> Callable[..., Any]:
    """The function ``spec`` names. UsageError naming ``field`` if it cannot be imported, is no function, or does not
    take ``num_arguments`` positional arguments. From here on a forgotten ``breakpoint()`` is ignored in this process.
    """
    module_name, separator, attribute = spec.partition(":")
    if not (separator and module_name and attribute):
        raise UsageError(f"{field} = {spec!r}: must be package.module:attribute")
    add_import_paths(import_paths)
    ignore()
    try:
        value: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        where = "looked for in the current folder, beside run.toml and among installed packages"
        raise UsageError(f"{field} = {spec!r}: import failed: {reason} ({where})") from error
    for name in attribute.split("."):
        if not hasattr(value, name):
            raise UsageError(f"{field} = {spec!r}: {module_name} has no {attribute}")
        value = getattr(value, name)
    if not callable(value):
        raise UsageError(f"{field} = {spec!r}: is of type {type(value).__name__}, not a function")
    problem = _signature_problem(value, num_arguments)
    if problem:
        raise UsageError(f"{field} = {spec!r}: {problem}")
    return value


def _signature_problem(function: Callable[..., Any], num_arguments: int) -> str | None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have none
        return None
    try:
        signature.bind(*[None] * num_arguments)
    except TypeError:
        return f"is called with {num_arguments} positional argument(s), but its signature is {signature}"
    return None
