"""Points of ``vime debug-attach run -b ...``: what each one means in the files as they are now."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from vime.debug.launch.command import Command
from vime.debug.stop.spec import Point, Who

_LINE = re.compile(r"\d+", re.ASCII)
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(\.<locals>\.[^\W\d]\w*)*")
MAIN = "__main__"


@dataclass(frozen=True)
class Placed:
    """A point, and where it landed in words: "p0 train.py:8 moved to 9, the first statement there"."""

    point: Point
    place: str


@dataclass(frozen=True)
class When:
    """What all points of a command line share."""

    condition: str = ""
    who: Who = field(default_factory=lambda: Who(is_first=True))
    hit: int = 1
    is_every: bool = False


def condition_problem(text: str) -> str:
    """What is wrong with a condition; "" for nothing."""
    try:
        compile(text, "<--if>", "eval", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return f"--if {text!r}: is no Python expression: {getattr(error, 'msg', None) or error}"
    return ""


def place(number: int, text: str, when: When, folders: Sequence[str], command: Command | None) -> Placed:
    """The point meant by ``text``. ``folders``: where the command finds its modules. ValueError says what is wrong."""
    before, colon, after = text.rpartition(":")
    if not colon or not before or not after:
        raise ValueError(f"-b {text}: is neither FILE:LINE nor MODULE:QUALNAME")
    template = Point(f"p{number}", text, condition=when.condition, who=when.who, hit=when.hit, is_every=when.is_every)
    if _LINE.fullmatch(after):
        if not int(after):
            raise ValueError(f"-b {text}: lines count from 1")
        file = Path(before)
        if not file.is_file():
            raise ValueError(f"-b {text}: there is no file {before}")
        source = file.read_bytes()
        if command is not None and os.path.isfile(command.file) and os.path.samefile(file, command.file):
            file = Path(command.file)  # by the name that Python is given: either may be a link
        path = os.path.abspath(file)
        point = replace(template, file=path, line=int(after), sha1=_sha1(source))
        return Placed(point, _landed(point, source, path))
    if before.endswith(".py") or os.sep in before:
        raise ValueError(f"-b {text}: a file goes with a line number; a function is MODULE:QUALNAME")
    if not _NAME.fullmatch(after):
        raise ValueError(f"-b {text}: {after!r} is no name of a function")
    found = _module_file(before, folders, command)
    if found is None:
        raise ValueError(f"-b {text}: there is no module {before} in {', '.join(folders)}")
    source = found.read_bytes()
    point = replace(template, sha1=_sha1(source), module=before, qualname=after)
    return Placed(point, _landed(point, source, str(found)))


def module_folders(command: Command | None, environment: Mapping[str, str]) -> list[str]:
    """Where the command will look for modules: the folder of its program, PYTHONPATH, what is installed."""
    first = os.getcwd()
    if command is not None and command.file:
        first = os.path.dirname(os.path.realpath(command.file))
    given = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    installed = [folder for folder in sys.path[1:] if folder]
    return list(dict.fromkeys([first, *map(os.path.abspath, given), *installed]))


def program_file(command: Command, folders: Sequence[str]) -> Path | None:
    """The source of the command's main program; None where it is not found in ``folders``."""
    if command.file:
        return Path(command.file) if os.path.isfile(command.file) else None
    package = _module_file_of(f"{command.module}.{MAIN}", folders)
    return package or _module_file_of(command.module, folders)


def _landed(point: Point, source: bytes, path: str) -> str:
    """Where it is in ``source``, in words; ValueError where there is no such place."""
    from vime.debug.stop.instrument import NoPlace, places

    shown = os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
    try:
        found = places(source, [point], path)[0]
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"-b {point.text}: {shown} is no Python that this interpreter reads: {error}") from error
    if isinstance(found, NoPlace):
        near = f"; there are {', '.join(found.near)}" if found.near else ""
        raise ValueError(f"-b {point.text}: {shown}: {found}{near}")
    where = f"{point.id} {shown}:{found.line}"
    if point.line and found.line != point.line:
        where = f"{point.id} {shown}:{point.line} moved to {found.line}, the first statement there"
    inside = f" in {found.function}" if found.function else ""
    return f"{where}{inside}{f'; {found.note}' if found.note else ''}"


def _module_file(name: str, folders: Sequence[str], command: Command | None) -> Path | None:
    """The source of a module, without importing anything."""
    if name != MAIN:
        return _module_file_of(name, folders)
    return None if command is None else program_file(command, folders)


def _module_file_of(name: str, folders: Sequence[str]) -> Path | None:
    path: Sequence[str] | None = folders
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for number in range(1, len(parts) + 1):
        if path is None:
            return None
        try:
            spec = PathFinder.find_spec(".".join(parts[:number]), path)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        path = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def _sha1(source: bytes) -> str:
    return hashlib.sha1(source, usedforsecurity=False).hexdigest()
