"""Leftovers of debugging in a Python file: calls that stop a process, open a port or join a cluster (case D16).

Found in the syntax tree, through every alias: strings, comments and namesakes are nobody's breakpoint.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vime.debug.leftovers.names import Names, Scope

_STOPS = "stops the process until somebody answers; without a terminal it ends it"
_WAITS = "waits for a debugger without any time limit"
_OPENS = "opens a port through which anybody who reaches it can run code"
_HOOKS = "changes what every breakpoint() of this process and its children does"
_CLUSTER = "starts a second Ray cluster or joins whichever is found"
_RETRY = "stays silently in a cluster that was joined before, with other settings than these"
_RUNS = "runs code under a debugger, which stops before its first line"

_DEBUGGERS = ("pdb", "ipdb", "pudb", "remote_pdb", "web_pdb", "ray.util.rpdb", "ray.util.pdb", "ray.util.ray_debugpy")
CALLS: dict[str, str] = {
    "builtins.breakpoint": _STOPS,
    "sys.breakpointhook": _STOPS,
    "IPython.embed": _STOPS,
    "IPython.core.debugger.set_trace": _STOPS,
    "remote_pdb.RemotePdb().set_trace": _STOPS,
    "pudb.remote.set_trace": _STOPS,
    **{f"{name}.set_trace": _STOPS for name in _DEBUGGERS},
    **{f"{name}.post_mortem": _STOPS for name in _DEBUGGERS},
    **{f"{name}.{call}": _STOPS for name in ("pdb", "ipdb", "pudb") for call in ("pm", "Pdb().set_trace")},
    **{f"{name}.{call}": _RUNS for name in ("pdb", "ipdb") for call in ("run", "runcall", "runeval", "runctx")},
    "pudb.runscript": _RUNS,
    "pudb.runcall": _RUNS,
    "pudb.runstatement": _RUNS,
    "debugpy.listen": _OPENS,
    "debugpy.wait_for_client": _WAITS,
    "debugpy.breakpoint": _STOPS,
    "debugpy.connect": _WAITS,
    "pydevd.settrace": _WAITS,
    "pydevd_pycharm.settrace": _WAITS,
}
"""Qualified name -> why a call of it matters. ``ray.init`` and the settings of hooks depend on their arguments."""
_VARIABLE = "PYTHONBREAKPOINT"
_DEPTH = 5000
_KEEP = re.compile(r"#\s*vime:\s*keep\b")


@dataclass(frozen=True, slots=True)
class Leftover:
    """One leftover.

    line, column  where it begins, from 1, as an editor counts
    name          what it stands for, e.g. "pdb.set_trace" for ``from pdb import set_trace as s; s()``
    what          as it is written, shortened
    why           why it matters
    is_kept       its line says ``# vime: keep``
    """

    file: str
    line: int
    column: int
    name: str
    what: str
    why: str
    is_kept: bool = False

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"

    @property
    def text(self) -> str:
        """As it is written, and what that stands for."""
        is_plain = self.name in self.what or "=" in self.name
        return self.what if is_plain else f"{self.what}, which is {self.name}"


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A leftover with the node that makes it: a call, or an assignment."""

    leftover: Leftover
    node: ast.Call | ast.Assign | ast.AnnAssign
    scope: Scope


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """A source text with its tree, its names, and what was found, in order."""

    text: str
    tree: ast.Module
    names: Names
    found: tuple[Found, ...]


class CannotParse(Exception):
    """The text is no Python of this version; the message says where."""


def parse(text: str) -> ast.Module:
    """The tree of ``text``. Raises CannotParse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the file's own string escapes
            return ast.parse(text)
    except SyntaxError as error:
        where = f" at line {error.lineno}" if error.lineno else ""
        raise CannotParse(f"no valid Python{where}: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise CannotParse(f"no valid Python: {error or 'nested too deeply'}") from error


@contextmanager
def deep_trees() -> Iterator[None]:
    """Generated code nests deeper (a sum of 500 terms, an elif chain) than Python lets functions call each other."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _DEPTH))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def find(text: str, file: str = "<string>") -> Module:
    """Every leftover in ``text``. Raises CannotParse."""
    try:
        with deep_trees():
            tree = parse(text)
            names = Names(tree)
    except RecursionError as error:
        raise CannotParse("nested too deeply to be read") from error
    hits = [*_calls(names), *_writes(names)]
    if not hits:
        return Module(text, tree, names, ())
    lines = split_lines(text)
    kept = _kept_lines(text)
    found = []
    for node, scope, name, why in hits:
        column = len(lines[node.lineno - 1].encode()[: node.col_offset].decode(errors="replace")) + 1
        is_kept = any(line in kept for line in range(node.lineno, (node.end_lineno or node.lineno) + 1))
        leftover = Leftover(file, node.lineno, column, name, _shown(node), why, is_kept)
        found.append(Found(leftover, node, scope))
    found.sort(key=lambda one: (one.leftover.line, one.leftover.column))
    return Module(text, tree, names, tuple(found))


def split_lines(text: str) -> list[str]:
    """Lines with their ends, as Python counts them: form feeds and Unicode's separators end none."""
    return io.StringIO(text, newline="").readlines() or [""]


def _kept_lines(text: str) -> set[int]:
    if "vime" not in text:
        return set()
    unix = "".join(line.rstrip("\r\n") + "\n" for line in split_lines(text))
    tokens = tokenize.generate_tokens(io.StringIO(unix).readline)
    try:
        return {t.start[0] for t in tokens if t.type == tokenize.COMMENT and _KEEP.match(t.string)}
    except (tokenize.TokenError, SyntaxError) as error:
        raise CannotParse(f"its comments cannot be read: {error}") from error


_Hit = tuple[ast.Call | ast.Assign | ast.AnnAssign, Scope, str, str]


def _calls(names: Names) -> Iterator[_Hit]:
    for node, scope in names.calls:
        for name in names.qualified(node.func, scope):
            why = CALLS.get(name) or _why_init(name, node) or _why_environment(name, node)
            if why:
                yield node, scope, name.removeprefix("builtins."), why
                break


def _why_init(name: str, node: ast.Call) -> str | None:
    """``ray.init`` names its cluster, or it is left over from somebody's machine (case D11)."""
    if name != "ray.init":
        return None
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    if _constant(given.get("ignore_reinit_error")) is True:
        return _RETRY
    if any(isinstance(argument, ast.Starred) for argument in node.args) or (None in given and "address" not in given):
        return None  # nobody knows
    address = node.args[0] if node.args else given.get("address", ast.Constant(None))
    return _CLUSTER if isinstance(address, ast.Constant) and address.value in (None, "auto") else None


def _why_environment(name: str, node: ast.Call) -> str | None:
    """``os.environ.setdefault``, ``.update`` and ``os.putenv`` of the variable, unless it turns breakpoints off."""
    if name in ("os.environ.setdefault", "os.putenv") and len(node.args) == 2:
        return _HOOKS if _constant(node.args[0]) == _VARIABLE and _constant(node.args[1]) != "0" else None
    if name != "os.environ.update":
        return None
    pairs: list[tuple[object, ast.expr]] = [(keyword.arg, keyword.value) for keyword in node.keywords]
    for argument in node.args:
        if isinstance(argument, ast.Dict):
            pairs += [(_constant(key), value) for key, value in zip(argument.keys, argument.values, strict=True)]
    return _HOOKS if any(key == _VARIABLE and _constant(value) != "0" for key, value in pairs) else None


def _writes(names: Names) -> Iterator[_Hit]:
    """``sys.breakpointhook = ...`` and ``os.environ["PYTHONBREAKPOINT"] = ...``."""
    for node, scope in names.writes:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Attribute) and "sys.breakpointhook" in names.qualified(target, scope):
                back = names.qualified(node.value, scope) if node.value is not None else ["sys.__breakpointhook__"]
                if "sys.__breakpointhook__" not in back:
                    yield node, scope, "sys.breakpointhook = ...", _HOOKS
            elif isinstance(target, ast.Subscript) and _constant(target.slice) == _VARIABLE:
                is_off = node.value is None or _constant(node.value) == "0"
                if "os.environ" in names.qualified(target.value, scope) and not is_off:
                    yield node, scope, f"os.environ[{_VARIABLE!r}] = ...", _HOOKS


def _constant(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _shown(node: ast.AST, limit: int = 60) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
