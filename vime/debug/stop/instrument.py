"""Source with calls in front of statements, compiled in memory; the file is never written.

A call has the line number before that of its statement, so that the next line that a debugger is told of is the
statement itself: it stops on the line, not behind it.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType

from vime.debug.stop.spec import Point

NAME = "__vime_hit__"
"""Of the function in an instrumented module. Two underscores at its end: no class mangles it."""
_MODULE = "vime.debug.stop.hit"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_NUM_CANDIDATES = 5


class NoPlace(ValueError):
    """There is nothing to stop at. ``near``: what the user may have meant."""

    def __init__(self, message: str, near: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.near = tuple(near)


@dataclass(frozen=True)
class Place:
    """Where a point has landed. ``line``: of the statement that it stops at; ``function``: "" at module level.

    ``note``: what the user should know about such a place; "" for none.
    """

    line: int
    function: str = ""
    note: str = ""


@dataclass
class _Slot:
    """A statement in its block. ``is_after``: the call goes behind it, because a docstring stays the first."""

    block: list[ast.stmt]
    statement: ast.stmt
    owners: tuple[str, ...]
    is_after: bool = False


def places(source: bytes | str, points: Sequence[Point], filename: str = "<source>") -> list[Place | NoPlace]:
    """Where each point lands in this source. SyntaxError where the source is none."""
    tree = ast.parse(source, filename)
    return [_place(tree, point)[1] for point in points]


def instrument(source: bytes | str, filename: str, points: Sequence[Point]) -> tuple[CodeType, list[Place | NoPlace]]:
    """Code of the file that calls ``hit`` before each point, and where each has landed. SyntaxError as Python's."""
    tree = ast.parse(source, filename)
    found = [(point, *_place(tree, point)) for point in points]
    for point, slot, place in found:
        if slot is not None and isinstance(place, Place):
            _insert(slot, point, place.line)
    if any(slot is not None for _, slot, _ in found):
        _import_hit(tree)
    return compile(tree, filename, "exec", dont_inherit=True), [place for _, _, place in found]


def _place(tree: ast.Module, point: Point) -> tuple[_Slot | None, Place | NoPlace]:
    try:
        slot = _first_of(tree, point.qualname) if point.qualname else _at_line(tree, point.line)
    except NoPlace as error:
        return None, error
    slot = _movable(slot)
    return slot, Place(_first_line(slot.statement), ".".join(slot.owners), _note(slot, point))


def _slots(tree: ast.AST, owners: tuple[str, ...] = ()) -> Iterator[_Slot]:
    """Every statement, an outer one before those inside."""
    for field in ("body", "handlers", "cases", "orelse", "finalbody"):
        block = getattr(tree, field, None)
        if not isinstance(block, list):
            continue
        for child in list(block):
            if isinstance(child, ast.stmt):
                yield _Slot(block, child, owners)
            is_named = isinstance(child, (*_FUNCTIONS, ast.ClassDef))
            yield from _slots(child, (*owners, child.name) if is_named else owners)


def _at_line(tree: ast.Module, line: int) -> _Slot:
    """The statement that starts at the line, else the innermost that covers it, else the next one inside or after."""
    slots = list(_slots(tree))
    for slot in slots:
        if slot.statement.lineno == line or _first_line(slot.statement) == line:
            return slot  # of several the outermost and first: what a debugger would stop at
    covering = [s for s in slots if _first_line(s.statement) <= line <= _last_line(s.statement)]
    if covering:
        inner = covering[-1]
        later = [s for s in slots if line < _first_line(s.statement) <= _last_line(inner.statement)]
        return later[0] if later and line > _header_end(inner.statement) else inner
    following = [slot for slot in slots if _first_line(slot.statement) > line]
    if not following:
        last = max((_last_line(s.statement) for s in slots), default=0)
        raise NoPlace(f"no statement at or after line {line}: the last one ends at line {last}")
    return min(following, key=lambda slot: _first_line(slot.statement))


def _first_of(tree: ast.Module, qualname: str) -> _Slot:
    """The first statement of a function or class."""
    wanted = tuple(part for part in qualname.split(".") if part != "<locals>")
    named = [s for s in _slots(tree) if isinstance(s.statement, (*_FUNCTIONS, ast.ClassDef))]
    names = [(*s.owners, s.statement.name) for s in named]  # type: ignore[attr-defined]
    for slot, name in zip(reversed(named), reversed(names), strict=True):  # of two with one name, the later one counts
        if name == wanted:
            return _Slot(slot.statement.body, slot.statement.body[0], name)  # type: ignore[attr-defined]
    functions = [".".join(n) for s, n in zip(named, names, strict=True) if isinstance(s.statement, _FUNCTIONS)]
    raise NoPlace(f"no function {qualname!r}", _nearest(qualname, functions))


def _nearest(name: str, known: Sequence[str]) -> list[str]:
    tail = name.rpartition(".")[2]
    same = [k for k in known if k.rpartition(".")[2] == tail]
    alike = difflib.get_close_matches(name, known, _NUM_CANDIDATES, 0.5)
    return list(dict.fromkeys([*same, *alike, *known]))[:_NUM_CANDIDATES]


def _movable(slot: _Slot) -> _Slot:
    """Past what must stay the first, and past what no code is made of."""
    block, start = slot.block, slot.block.index(slot.statement)
    for index in range(start, len(block)):
        if not _is_fixed(block, index):
            return _Slot(block, block[index], slot.owners)
    return _Slot(block, block[-1], slot.owners, is_after=True)


def _is_fixed(block: Sequence[ast.stmt], index: int) -> bool:
    statement = block[index]
    if isinstance(statement, (ast.Global, ast.Nonlocal)):
        return True
    if isinstance(statement, ast.AnnAssign) and statement.value is None:
        return True
    if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
        return True
    return index == 0 and _is_text(statement)


def _is_text(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _note(slot: _Slot, point: Point) -> str:
    statement = slot.statement
    if isinstance(statement, (ast.For, ast.AsyncFor, ast.While)):
        inside = _first_line(statement.body[0])
        return f"stops once, before the loop starts; line {inside} is the first inside"
    if isinstance(statement, _FUNCTIONS) and not point.qualname:
        inside = _first_line(_movable(_Slot(statement.body, statement.body[0], ())).statement)
        return f"stops where {statement.name} is defined, not where it is called: that would be line {inside}"
    if isinstance(statement, ast.ClassDef) and not point.qualname:
        return f"stops where class {statement.name} is defined"
    if any(isinstance(node, ast.Lambda) for node in _own_expressions(statement)):
        return "stops where the lambda is made, not where it is called"
    return ""


def _own_expressions(statement: ast.AST) -> Iterator[ast.expr]:
    """What is in the statement itself, not in the statements inside it."""
    todo = [statement]
    while todo:  # a sum may be thousands deep
        for child in ast.iter_child_nodes(todo.pop()):
            if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
                continue
            if isinstance(child, ast.expr):
                yield child
            todo.append(child)


def _insert(slot: _Slot, point: Point, line: int) -> None:
    arguments: list[ast.expr] = [ast.Constant(point.id), *_condition(point)]
    call: ast.stmt = ast.Expr(ast.Call(ast.Name(NAME, ast.Load()), arguments, []))
    _put_at(call, line - 1)
    index = slot.block.index(slot.statement)
    if not slot.is_after:
        slot.block.insert(index, call)
        return
    here = ast.Pass()  # else nothing is left to stop at
    _put_at(here, line)
    slot.block[index + 1 :] = [call, here]


def _condition(point: Point) -> list[ast.expr]:
    """As a function that sees the variables of its place: to ask a frame for all of its own would keep their values
    alive, and change what the program itself has from ``locals()``. Empty for none, and for what is no expression.
    """
    try:
        wanted = [ast.parse(point.condition.strip(), mode="eval").body] if point.condition else []
    except SyntaxError:
        return []
    nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return [ast.Lambda(nothing, expression) for expression in wanted]


def _import_hit(tree: ast.Module) -> None:
    """In front of all that may stay behind it. An import, so that a function shipped by value finds it elsewhere."""
    line: ast.stmt = ast.ImportFrom(_MODULE, [ast.alias("hit", NAME)], 0)
    _put_at(line, 0)
    index = 0
    while index < len(tree.body) and (
        (index == 0 and _is_text(tree.body[0]))
        or (isinstance(s := tree.body[index], ast.ImportFrom) and s.module == "__future__")
    ):
        index += 1
    tree.body.insert(index, line)


def _put_at(tree: ast.AST, line: int) -> None:
    for node in ast.walk(tree):
        if isinstance(node, (ast.stmt, ast.expr, ast.alias, ast.arg, ast.keyword)):
            node.lineno = node.end_lineno = line
            node.col_offset = node.end_col_offset = 0


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(d.lineno for d in decorators)])


def _last_line(statement: ast.stmt) -> int:
    return statement.end_lineno or statement.lineno


def _header_end(statement: ast.stmt) -> int:
    """Last line before the first statement inside; of one without a block its own last line."""
    body = getattr(statement, "body", None) or getattr(statement, "cases", None)
    if not body:
        return _last_line(statement)
    header = [node.end_lineno or 0 for node in _own_expressions(statement)]
    return max([statement.lineno, *header])
