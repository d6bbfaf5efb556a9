"""Which points a file has in this process: the file itself, a copy of it elsewhere, or a module by its name."""

from __future__ import annotations

import hashlib
import os
import site
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import CodeType

from vime.debug.stop.boot import MAIN
from vime.debug.stop.instrument import NoPlace, instrument
from vime.debug.stop.say import say, say_once
from vime.debug.stop.spec import Point, Spec, current

_RAY_COPIES = "/runtime_resources/working_dir_files/"
_roots: dict[str, str] = {}
"""Folder of copied code in this process -> the folder that it was copied from."""


@cache
def spec_here() -> Spec | None:
    """The debug run of this process, read once. Said where it cannot be read."""
    try:
        return current()
    except ValueError as error:
        say(f"no points in process {os.getpid()}: {error}")
        return None


def points_of(name: str, path: str) -> list[Point]:
    """The points of the file at ``path``, loaded as module ``name``."""
    spec = spec_here()
    if spec is None:
        return []
    real = os.path.realpath(path)
    return [point for point in spec.points if _is_in(point, spec, name, real)]


def code_of(name: str, path: str) -> CodeType | None:
    """Code with the file's points in it; None where it has none, or cannot be read: Python itself then says why."""
    points = points_of(name, path)
    if not points:
        return None
    try:
        with open(path, "rb") as file:
            source = file.read()
        code, places = instrument(source, path, points)
    except (OSError, SyntaxError, ValueError):
        return None
    except RecursionError as error:  # Python itself reads deeper expressions than it compiles from a tree
        say(f"{path} has no points in process {os.getpid()}: {error}")
        return None
    _tell(points, places, path, hashlib.sha1(source).hexdigest())
    return code


def roots_of(file: str) -> tuple[str, str]:
    """(folder where the command was given, folder here) of a file that is a copy; ("", "") of any other."""
    real = os.path.realpath(file)
    for here, there in _roots.items():
        if real.startswith(here + os.sep):
            return there, here
    before, copies, inside = real.partition(_RAY_COPIES)
    spec = spec_here()
    if not copies or spec is None or not spec.working_dir:
        return "", ""
    return os.path.realpath(spec.working_dir), before + copies + inside.partition(os.sep)[0]


@cache
def library_folders() -> tuple[str, ...]:
    """Where Python's own modules and installed packages are, not the user's code."""
    paths = sysconfig.get_paths()
    found = {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    found.update(site.getsitepackages() if hasattr(site, "getsitepackages") else ())
    return tuple(sorted(os.path.realpath(folder) + os.sep for folder in found))


def is_library(file: str) -> bool:
    """Whether a file is no code of the user's: installed, Python's own, or none at all."""
    return not os.path.isabs(file) or not os.path.exists(file) or os.path.realpath(file).startswith(library_folders())


def _is_in(point: Point, spec: Spec, name: str, real: str) -> bool:
    if point.module and (point.module == name or (point.module in MAIN and name in MAIN)):
        return not point.file or point.module not in MAIN or _is_file(point, spec, real)
    return bool(point.file) and _is_file(point, spec, real)


def _is_file(point: Point, spec: Spec, real: str) -> bool:
    """Whether this is the file, or a copy: by relative path and content, or by relative path in a copied folder."""
    if os.path.realpath(point.file) == real:
        return True
    if not spec.working_dir:
        return False
    root = os.path.realpath(spec.working_dir)
    relative = os.path.relpath(os.path.realpath(point.file), root)
    if relative.startswith("..") or not real.endswith(os.sep + relative):
        return False
    here = real.removesuffix(os.sep + relative)
    is_copied = _RAY_COPIES in real or here == os.path.realpath(os.getcwd())
    if not is_copied and _sha1(real) != point.sha1:
        return False
    _roots[here] = root
    return True


def _sha1(path: str) -> str:
    try:
        return hashlib.sha1(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def _tell(points: Sequence[Point], places: Sequence[object], path: str, sha1: str) -> None:
    for point, place in zip(points, places, strict=True):
        if isinstance(place, NoPlace):
            near = f"; there is {', '.join(place.near)}" if place.near else ""
            say_once(f"{point.text} never stops in process {os.getpid()}: {place} in {path}{near}")
        elif point.sha1 and point.sha1 != sha1:
            say_once(f"{path} is not the file that {point.text} was given for: the copy differs, lines may be off")
