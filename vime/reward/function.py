"""User functions by name: ``package.module:attribute``."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from vime.errors import UsageError
from vime.reward.breakpoints import ignore


def add_import_paths(import_paths: Sequence[str]) -> None:
    """Make the current folder and ``import_paths`` (say, that of run.toml) importable, before installed packages."""
    for path in reversed([os.getcwd(), *map(os.path.abspath, import_paths)]):
        if path not in sys.path:
            sys.path.insert(0, path)


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
