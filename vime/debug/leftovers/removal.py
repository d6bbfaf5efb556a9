"""Takes leftovers out of a source text and leaves the rest as it is, byte for byte.

Only statements of their own are taken out. The result is parsed again: a text whose tree is not exactly the old one
without the leftovers is not given out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from vime.debug.leftovers.found import CannotParse, Found, Leftover, Module, deep_trees, parse, split_lines
from vime.debug.leftovers.names import Import, Scope

_SPACE = " \t\f"
_LIKE_A_TYPE = re.compile(r"[\w.,|\[\] ]+")


@dataclass(frozen=True, slots=True)
class Removal:
    """text     the source without what could be taken out
    removed  what was taken out
    left     what was not, with the reason
    imports  names whose imports were taken out with it
    """

    text: str
    removed: tuple[Leftover, ...] = ()
    left: tuple[tuple[Leftover, str], ...] = ()
    imports: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Edit:
    """Characters ``start`` to ``end`` become ``text``."""

    start: int
    end: int
    text: str = ""


_Statements = dict[ast.stmt, tuple[ast.AST, list[ast.stmt]]]
"""Statement -> (its parent, the block it is in)."""
_Names = dict[ast.Import | ast.ImportFrom, set[int]]
"""Import -> which of its names."""


class _Unsafe(Exception):
    """The layout of the source does not let a statement be taken out."""


def remove(module: Module) -> Removal:
    """``module`` without its leftovers, but for those that are kept on purpose."""
    wanted = [one for one in module.found if not one.leftover.is_kept]
    statements = _statements(module.tree)
    alone: set[ast.AST] = {s.value if isinstance(s, ast.Expr) else s for s in statements}
    reasons = {one: _reason(one, one.node in alone) for one in wanted}
    removed = [one for one in wanted if reasons[one] is None]
    left = [(one.leftover, reason) for one, reason in reasons.items() if reason is not None]
    if not removed:
        return Removal(module.text, left=tuple(left))
    taken: list[Found] = []
    text, imports = module.text, set[str]()
    try:
        text, imports = _without(module, removed, statements)
        taken = removed
    except _Unsafe:  # one of them: find out which
        for one in removed:
            try:
                text, imports = _without(module, [*taken, one], statements)
                taken = [*taken, one]
            except _Unsafe as error:
                left.append((one.leftover, str(error)))
    left.sort(key=lambda pair: (pair[0].line, pair[0].column))
    return Removal(text, tuple(one.leftover for one in taken), tuple(left), tuple(sorted(imports)))


def _statements(tree: ast.Module) -> _Statements:
    return {statement: (node, block) for node in ast.walk(tree) for block in _blocks(node) for statement in block}


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block


def _reason(found: Found, is_alone: bool) -> str | None:
    """Why a leftover cannot be taken out by itself; None if it can."""
    node, leftover = found.node, found.leftover
    if isinstance(node, ast.Call):
        if not is_alone:
            return "is part of an expression"
        if leftover.name == "ray.init" and (node.args or node.keywords):
            return "has arguments: name the cluster, or take it out by hand"
        if ".run" in leftover.name:
            return "runs something that would no longer run"
        inner: Sequence[ast.AST] = [*node.args, *node.keywords]
    else:
        if len(node.targets if isinstance(node, ast.Assign) else [node.target]) > 1:
            return "assigns to something else as well"
        inner = [node.value] if node.value is not None else []
    doing = ast.Call | ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr
    if any(isinstance(part, doing) for argument in inner for part in ast.walk(argument)):
        return "its arguments do something themselves"
    return None


def _without(module: Module, removed: Sequence[Found], statements: _Statements) -> tuple[str, set[str]]:
    """The text without ``removed`` and the imports only they used. Raises _Unsafe."""
    nodes: set[ast.AST] = {one.node for one in removed}
    gone = {s for s in statements if s in nodes or (isinstance(s, ast.Expr) and s.value in nodes)}
    positions = _Positions(module.text)
    edits, names = _imports(module, gone, positions)
    imports = {s.names[i].asname or s.names[i].name for s, found in names.items() for i in found}
    blocks = {id(block): (parent, block) for s in gone for parent, block in [statements[s]]}
    for parent, block in blocks.values():
        edits += _edits(parent, block, gone, positions)
    text = _apply(module.text, edits)
    _verify(module, text, gone, {s: found for s, found in names.items() if s not in gone})
    return text, imports


def _imports(module: Module, gone: set[ast.stmt], positions: _Positions) -> tuple[list[_Edit], _Names]:
    """Edits for imports that keep other names, and all names that go. Imports that go whole are added to ``gone``."""
    names: dict[ast.Import | ast.ImportFrom, set[int]] = {}
    for one in _unused(module, gone):
        names.setdefault(one.statement, set()).add(one.index)
    edits: list[_Edit] = []
    for statement, indices in list(names.items()):
        kept_line = any("vime: keep" in line for line in positions.lines[statement.lineno - 1 : statement.end_lineno])
        if kept_line:
            del names[statement]
        elif len(indices) == len(statement.names):
            gone.add(statement)
        elif (shorter := _shorter(statement, indices, positions)) is not None:
            edits += shorter
        else:
            del names[statement]
    return edits, names


def _unused(module: Module, gone: set[ast.stmt]) -> list[Import]:
    """Imports that what is taken out used, and nothing else does."""
    inside = {id(node) for statement in gone for node in ast.walk(statement)}
    quoted, exported = _strings(module.tree)
    was_used: dict[tuple[int, str], Scope] = {}
    is_used: set[tuple[int, str]] = set()
    for node, scope in module.names.uses:
        owner = scope.owner(node.id)
        if owner is not None and id(node) in inside:
            was_used[id(owner), node.id] = owner
        elif owner is not None:
            is_used.add((id(owner), node.id))
    found = []
    for (key, name), owner in was_used.items():
        is_named = name in exported or re.search(rf"(?<![\w.]){name}\.", quoted)
        if (key, name) not in is_used and not is_named:
            found += owner.imports.get(name, [])
    return found


def _strings(tree: ast.Module) -> tuple[str, set[str]]:
    """Strings that may be types written as text, in one; and the names in ``__all__``."""
    types: list[str] = []
    exported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
                exported |= {str(part.value) for part in ast.walk(node.value) if isinstance(part, ast.Constant)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _LIKE_A_TYPE.fullmatch(node.value):
            types.append(node.value)
    return " ".join(types), exported


class _Positions:
    """Where nodes stand in a text, in characters."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = split_lines(text)
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line))

    def at(self, line: int, column: int) -> int:
        """``line`` from 1, ``column`` in bytes of UTF-8 from 0, as a tree has them."""
        text = self.lines[line - 1]
        return self._starts[line - 1] + (column if text.isascii() else len(text.encode()[:column].decode()))

    def start(self, node: ast.stmt | ast.alias) -> int:
        return self.at(node.lineno, node.col_offset)

    def end(self, node: ast.stmt | ast.alias) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.at(node.end_lineno, node.end_col_offset)


def _shorter(statement: ast.Import | ast.ImportFrom, indices: set[int], at: _Positions) -> list[_Edit] | None:
    """The edits that take single names out of an import; None where a comment stands between them."""
    edits, names = [], statement.names
    kept = [i for i in range(len(names)) if i not in indices]
    for i in sorted(indices):
        if i < kept[-1]:  # up to the next name
            edits.append(_Edit(at.start(names[i]), at.start(names[i + 1])))
        else:  # from the end of the last that stays
            edits.append(_Edit(at.end(names[i - 1]), at.end(names[i])))
    return None if any("#" in at.text[e.start : e.end] for e in edits) else edits


def _edits(parent: ast.AST, block: list[ast.stmt], gone: set[ast.stmt], at: _Positions) -> Iterator[_Edit]:
    """Take the statements of one block out, logical line by logical line."""
    is_emptied = all(statement in gone for statement in block) and not isinstance(parent, ast.Module)
    if is_emptied and isinstance(parent, ast.While) and block is parent.body:
        raise _Unsafe("is all that its while loop does: without it the loop has no end")
    for line in _logical_lines(block, at):
        leaving = [statement for statement in line if statement in gone]
        if not leaving:
            continue
        is_first = block[0] is line[0]
        if len(leaving) < len(line):
            yield from _cut(line, gone, at)
        elif is_emptied and is_first:
            yield _Edit(at.start(line[0]), at.end(line[-1]), "pass")
        else:
            yield _whole_line(line, at)


def _logical_lines(block: list[ast.stmt], at: _Positions) -> Iterator[list[ast.stmt]]:
    """Statements that stand on one line, separated by semicolons."""
    line = block[:1]
    for before, statement in pairwise(block):
        between = at.text[at.end(before) : at.start(statement)].strip(_SPACE)
        if between == ";":
            line.append(statement)
        else:
            yield line
            line = [statement]
    yield line


def _cut(line: list[ast.stmt], gone: set[ast.stmt], at: _Positions) -> Iterator[_Edit]:
    """Some of the statements of a line: each with the semicolon after it, or before it where it is the last to stay."""
    last_kept = max(i for i, statement in enumerate(line) if statement not in gone)
    for i, statement in enumerate(line):
        if statement in gone and i < last_kept:
            yield _Edit(at.start(statement), at.start(line[i + 1]))
        elif statement in gone:
            yield _Edit(at.end(line[i - 1]), at.end(statement))


def _whole_line(line: list[ast.stmt], at: _Positions) -> _Edit:
    """The line with its end and the comment on it; form feeds before it stay."""
    first, last = line[0], line[-1]
    assert last.end_lineno is not None
    start, line_start = at.start(first), at.at(first.lineno, 0)
    before = at.text[line_start:start]
    if before.strip(_SPACE):
        raise _Unsafe("stands behind something else on its line")
    if at.text[:line_start].rstrip("\r\n").endswith("\\"):
        raise _Unsafe("its line continues the one above")
    end = at.at(last.end_lineno, 0) + len(at.lines[last.end_lineno - 1])
    rest = at.text[at.end(last) : end].strip(_SPACE + "\r\n")
    if rest.removeprefix(";").strip(_SPACE)[:1] not in ("", "#"):
        raise _Unsafe("something else follows on its line")
    return _Edit(line_start + before.rfind("\f") + 1, end)


def _apply(text: str, edits: Sequence[_Edit]) -> str:
    for edit in sorted(edits, key=lambda e: e.start, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def _verify(module: Module, text: str, gone: set[ast.stmt], partly: _Names) -> None:
    """Raises _Unsafe unless ``text`` is exactly the module without ``gone`` and those names of imports."""
    try:
        with deep_trees():
            is_same = ast.dump(parse(text)) == ast.dump(expected(module.text, gone, partly))
    except (CannotParse, RecursionError) as error:
        raise _Unsafe("what stays could not be compared with what was there") from error
    if not is_same:
        raise _Unsafe("cannot be taken out of its line")


def expected(text: str, gone: set[ast.stmt], partly: _Names) -> ast.Module:
    """A fresh tree of ``text`` without statements at the places of ``gone`` and names of the imports in ``partly``."""
    places = {(s.lineno, s.col_offset, type(s)) for s in gone}
    shorter = {(s.lineno, s.col_offset): found for s, found in partly.items()}
    tree = parse(text)
    for node in list(ast.walk(tree)):
        for block in _blocks(node):
            stay = [s for s in block if (s.lineno, s.col_offset, type(s)) not in places]
            if block and not stay and not isinstance(node, ast.Module):
                stay = [ast.Pass()]
            block[:] = stay
        if isinstance(node, ast.Import | ast.ImportFrom) and (node.lineno, node.col_offset) in shorter:
            found = shorter[node.lineno, node.col_offset]
            node.names = [alias for i, alias in enumerate(node.names) if i not in found]
    return tree
