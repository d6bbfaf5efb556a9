"""Leftovers in the modules a configuration names, and in those beside them that they import. Nothing is imported."""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from vime.config.schema import Config
from vime.debug.leftovers.found import CALLS, CannotParse, Leftover, find
from vime.debug.leftovers.sources import SKIPPED, Source, Unreadable
from vime.reward.breakpoints import DEBUG_SPEC, Ignored, is_debug_run
from vime.reward.function import add_import_paths

_LIBRARIES = frozenset({"site-packages", "dist-packages"})
_NOT_THEIRS = _LIBRARIES | SKIPPED
_OURS = ("vime", "vime_cli")


@dataclass(frozen=True, slots=True)
class UserLeftovers:
    """What the user's own modules hold.

    leftovers    by file, without those that are kept on purpose
    not_checked  (file, reason)
    """

    leftovers: tuple[Leftover, ...] = ()
    not_checked: tuple[tuple[str, str], ...] = ()

    @property
    def ignored(self) -> Ignored:
        """What a run ignores of it."""
        found = [one for one in self.leftovers if _can_be_ignored(one)]
        calls = dict.fromkeys(one.name for one in found if "." in one.name and one.name != "sys.breakpointhook")
        return Ignored(tuple(calls), tuple(f"{one.file}:{one.line}" for one in found))

    def warnings(self) -> Iterator[str]:
        """One line per place. In a debug run only of what would harm it."""
        for one in self.leftovers:
            place = f"{_short(one.file)}:{one.line}"
            if not _can_be_ignored(one):
                yield f"{one.text} in {place} is not ignored: it {one.why}"
            elif os.environ.get(DEBUG_SPEC):
                stops = one.name.rpartition(".")[2] == "breakpoint"
                does = "stops this debug run" if stops else "is ignored in a debug run, where breakpoint() stops"
                yield f"{one.text} in {place} {does}"
            elif not is_debug_run():
                out = f"vime debug-attach check --fix {_short(one.file)} takes it out"
                yield f"{one.text} in {place} is ignored outside debug runs; {out}"
        for file, reason in self.not_checked:
            yield f"{_short(file)}: not checked for breakpoints: {reason}"


def user_leftovers(config: Config, import_paths: Sequence[str]) -> UserLeftovers:
    """Leftovers in the modules of ``reward.function`` and ``rollout.generate``, as far as this run loads them.

    Looked up as they will be, with ``import_paths`` and the current folder before installed packages.
    """
    reward = config.reward.function if config.reward.name == "user" else None
    names = [spec.partition(":")[0] for spec in (reward, config.rollout.generate) if spec and config.needs_engines]
    if not names:
        return UserLeftovers()
    add_import_paths(import_paths)
    seen: set[str] = set()
    leftovers: list[Leftover] = []
    not_checked: list[tuple[str, str]] = []
    left = [(name, name) for name in reversed(names)]
    while left:
        name, asked_by = left.pop()
        for module, file in _files(name, asked_by):
            if file in seen:
                continue
            seen.add(file)
            try:
                found = find(Source.of(Path(file).read_bytes()).text, file)
            except (OSError, Unreadable, CannotParse) as error:
                not_checked.append((file, str(error)))
                continue
            leftovers += [one.leftover for one in found.found if not one.leftover.is_kept]
            left += [(imported, asked_by) for imported in _imported(found.tree, module, file)]
    return UserLeftovers(tuple(leftovers), tuple(not_checked))


def _can_be_ignored(one: Leftover) -> bool:
    """Functions that can be replaced. Not what runs code, nor a hook that the user sets, nor a cluster."""
    is_function = one.name in CALLS or f"builtins.{one.name}" in CALLS
    return is_function and "()" not in one.name and ".run" not in one.name


def _files(name: str, asked_by: str) -> Iterator[tuple[str, str]]:
    """(module, file) of a module and of the packages around it, where they are the user's own."""
    root = _root(asked_by)
    path: Sequence[str] | None = None
    parts = name.split(".")
    for number in range(1, len(parts) + 1):
        module = ".".join(parts[:number])
        spec = _spec(module, path)
        if spec is None:
            return
        if spec.origin and spec.origin.endswith(".py") and root is not None and _is_own(spec.origin, root):
            yield module, os.path.abspath(spec.origin)
        if spec.submodule_search_locations is None:
            return
        path = list(spec.submodule_search_locations)


def _spec(module: str, path: Sequence[str] | None) -> ModuleSpec | None:
    try:
        return PathFinder.find_spec(module, sys.path if path is None else path)
    except (ImportError, ValueError):
        return None


def _root(name: str) -> Path | None:
    """The folder the module ``name`` is found in; of an installed package the package itself; None: nobody's own."""
    top = name.partition(".")[0]
    spec = _spec(top, None)
    if spec is None or top in _OURS:
        return None
    locations = list(spec.submodule_search_locations or ())
    folder = Path(os.path.abspath(locations[0] if locations else spec.origin or "."))
    if not _LIBRARIES.isdisjoint(folder.parts):
        return folder if locations else None
    return None if folder.is_relative_to(sysconfig.get_path("stdlib")) else folder.parent


def _is_own(file: str, root: Path) -> bool:
    path = Path(os.path.abspath(file))
    if not path.is_relative_to(root):
        return False
    inside = path.relative_to(root).parts
    return inside[0] not in _OURS and not any(part in _NOT_THEIRS or part.startswith(".") for part in inside[:-1])


def _imported(tree: ast.Module, module: str, file: str) -> Iterator[str]:
    """Names of modules that ``module`` may import; what is none is not found later."""
    package = module if os.path.basename(file) == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".") if package else []
            above = parts[: len(parts) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" if origin else alias.name for alias in node.names)


def _short(file: str) -> str:
    """Relative to the current folder where it is below it."""
    path = os.path.relpath(file)
    return file if path.startswith("..") else path
