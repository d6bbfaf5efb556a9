"""``--where`` and ``--sort``: a small expression language over the fields of a sample. No user text is ever run.

    reward < 0.1 and status == 'truncated'
    'Answer:' not in text or metadata['level'] in (4, 5)

The text is parsed to Python's syntax tree, every node of it must be on the list below, and the tree becomes nested
functions once. What has no value (None, a missing metadata key, a division by zero) compares as false, but for ``==``,
``!=`` and ``is None``; arithmetic with it has no value.
"""

from __future__ import annotations

import ast
import difflib
import operator
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vime.errors import UsageError
from vime.record.names import FIELDS, STATUSES

Columns = Mapping[str, Sequence[Any]]
Evaluate = Callable[[Any, int], Any]  # (columns, number of the sample) -> value

MAX_CHARS = 2000
MAX_DEPTH = 40
MAX_BITS = 1024  # of a whole number

ARITHMETIC: dict[type, tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod),
    ast.Pow: ("**", operator.pow),
}
ORDER: dict[type, tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
}
FUNCTIONS: dict[str, int] = {"len": 1, "round": 2, "abs": 1, "lower": 1}
"""Name -> largest number of arguments."""

HINT = (
    f"fields: {', '.join(FIELDS)}; functions: {', '.join(FUNCTIONS)}; "
    "and, or, not, in, is None, comparisons, + - * / // % **; metadata['key']"
)


class Refused(Exception):
    """A part of the expression that is not allowed, or a value that it does not fit."""


@dataclass(frozen=True)
class Expression:
    """A checked expression. ``metadata_keys``: what it asks of ``metadata``."""

    option: str
    text: str
    metadata_keys: frozenset[str]
    _evaluate: Evaluate = field(repr=False)

    def values(self, fields: Any) -> list[Any]:
        """The value for every sample. UsageError naming the sample whose values do not fit."""
        return [self._value(fields, i) for i in range(len(fields))]

    def matches(self, fields: Any) -> list[int]:
        """The numbers of the samples for which it is true."""
        return [i for i, value in enumerate(self.values(fields)) if value]

    def _value(self, fields: Any, i: int) -> Any:
        try:
            return self._evaluate(fields, i)
        except Refused as problem:
            name = f"sample {fields['group_id'][i]}/{fields['index'][i]}"
            raise UsageError(f"{self.option} {shown(self.text)}: {name}: {problem}", HINT) from problem


def condition(text: str, option: str = "--where") -> Expression:
    """An expression that is true or false for every sample. UsageError (one line) naming the part that is wrong."""
    return _compiled(text, option, is_condition=True)


def sort_key(text: str, option: str = "--sort") -> Expression:
    """An expression with a value for every sample."""
    return _compiled(text, option, is_condition=False)


def _compiled(text: str, option: str, is_condition: bool) -> Expression:
    try:
        tree = _parse(text)
        compiler = _Compiler()
        evaluate = compiler.condition(tree, 0) if is_condition else compiler.value(tree, 0)
    except Refused as problem:
        raise UsageError(f"{option} {shown(text)}: {problem}", HINT) from problem
    return Expression(option, text, frozenset(compiler.metadata_keys), evaluate)


def _parse(text: str) -> ast.expr:
    if not text.strip():
        raise Refused("is empty")
    if len(text) > MAX_CHARS:
        raise Refused(f"has {len(text)} characters, at most {MAX_CHARS} are allowed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, Warning) as error:
        if re.search(r"[^=<>!]=[^=]", text):
            raise Refused("= compares nothing, == does") from error
        raise Refused(getattr(error, "msg", None) or str(error)) from error
    except (RecursionError, MemoryError) as error:
        raise Refused("is nested too deeply") from error


class _Compiler:
    """Syntax tree -> function. Collects the keys that are asked of ``metadata``."""

    def __init__(self) -> None:
        self.metadata_keys: set[str] = set()

    def condition(self, node: ast.expr, depth: int) -> Evaluate:
        evaluate, part = self.value(node, depth), _source(node)

        def is_true(columns: Columns, i: int) -> bool:
            found = evaluate(columns, i)
            if found is None or isinstance(found, bool):
                return bool(found)
            raise Refused(f"{part} is {_kind(found)} and no condition; compare it with something")

        return is_true

    def value(self, node: ast.expr, depth: int) -> Evaluate:
        if depth > MAX_DEPTH:
            raise Refused("is nested too deeply")
        compile_node = _NODES.get(type(node))
        if compile_node is None:
            raise Refused(f"{_source(node)} ({type(node).__name__}) is not allowed")
        return compile_node(self, node, depth + 1)

    def constant(self, node: ast.Constant, depth: int) -> Evaluate:
        found = node.value
        if not isinstance(found, str | int | float | None):
            raise Refused(f"{_source(node)} ({type(found).__name__}) is not allowed")
        return lambda columns, i: found

    def name(self, node: ast.Name, depth: int) -> Evaluate:
        name = node.id
        if name not in FIELDS:
            raise Refused(f"unknown name {name}{_near(name, [*FIELDS, *FUNCTIONS])}")
        return lambda columns, i: columns[name][i]

    def sequence(self, node: ast.Tuple | ast.List | ast.Set, depth: int) -> Evaluate:
        parts = [self.value(part, depth) for part in node.elts]
        return lambda columns, i: [part(columns, i) for part in parts]

    def boolean(self, node: ast.BoolOp, depth: int) -> Evaluate:
        parts = [self.condition(part, depth) for part in node.values]
        if isinstance(node.op, ast.And):
            return lambda columns, i: all(part(columns, i) for part in parts)
        return lambda columns, i: any(part(columns, i) for part in parts)

    def unary(self, node: ast.UnaryOp, depth: int) -> Evaluate:
        if isinstance(node.op, ast.Not):
            condition = self.condition(node.operand, depth)
            return lambda columns, i: not condition(columns, i)
        if not isinstance(node.op, ast.USub | ast.UAdd):
            raise Refused(f"{_source(node)} ({type(node.op).__name__}) is not allowed")
        operand, part = self.value(node.operand, depth), _source(node)
        sign = -1 if isinstance(node.op, ast.USub) else 1
        return lambda columns, i: _arithmetic(ast.Mult, sign, operand(columns, i), part)

    def binary(self, node: ast.BinOp, depth: int) -> Evaluate:
        kind, part = type(node.op), _source(node)
        if kind not in ARITHMETIC:
            raise Refused(f"{part} ({kind.__name__}) is not allowed")
        left, right = self.value(node.left, depth), self.value(node.right, depth)
        return lambda columns, i: _arithmetic(kind, left(columns, i), right(columns, i), part)

    def compare(self, node: ast.Compare, depth: int) -> Evaluate:
        _check_status(node)
        part = _source(node)
        operands = [self.value(operand, depth) for operand in (node.left, *node.comparators)]
        for op, right in zip(node.ops, node.comparators, strict=True):
            if isinstance(op, ast.Is | ast.IsNot) and not _is_singleton(right):
                raise Refused(f"{part}: is goes with None, True and False; use ==")
        kinds = [type(op) for op in node.ops]

        def is_true(columns: Columns, i: int) -> bool:
            left = operands[0](columns, i)
            for kind, operand in zip(kinds, operands[1:], strict=True):
                right = operand(columns, i)
                if not _compared(kind, left, right, part):
                    return False
                left = right
            return True

        return is_true

    def call(self, node: ast.Call, depth: int) -> Evaluate:
        if not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS:
            near = _near(node.func.id, FUNCTIONS) if isinstance(node.func, ast.Name) else ""
            raise Refused(f"{_source(node)}: a call of {_source(node.func)} is not allowed{near}")
        name, part = node.func.id, _source(node)
        if node.keywords or not 1 <= len(node.args) <= FUNCTIONS[name]:
            raise Refused(f"{part}: {name} takes {'1 or 2 arguments' if FUNCTIONS[name] == 2 else '1 argument'}")
        arguments = [self.value(argument, depth) for argument in node.args]
        return lambda columns, i: _called(name, [argument(columns, i) for argument in arguments], part)

    def subscript(self, node: ast.Subscript, depth: int) -> Evaluate:
        try:
            key = ast.literal_eval(node.slice)
        except (ValueError, RecursionError):
            key = None
        part = _source(node)
        if not isinstance(key, str | int) or isinstance(key, bool):
            raise Refused(f"{part}: what stands in [ ] must be a text or a whole number")
        if isinstance(node.value, ast.Name) and node.value.id == "metadata":
            self.metadata_keys.add(str(key))
        holder = self.value(node.value, depth)
        return lambda columns, i: _entry(holder(columns, i), key, part)


_NODES: dict[type, Callable[[_Compiler, Any, int], Evaluate]] = {
    ast.Constant: _Compiler.constant,
    ast.Name: _Compiler.name,
    ast.Tuple: _Compiler.sequence,
    ast.List: _Compiler.sequence,
    ast.Set: _Compiler.sequence,
    ast.BoolOp: _Compiler.boolean,
    ast.UnaryOp: _Compiler.unary,
    ast.BinOp: _Compiler.binary,
    ast.Compare: _Compiler.compare,
    ast.Call: _Compiler.call,
    ast.Subscript: _Compiler.subscript,
}
"""The nodes that are allowed; anything else is refused by name."""


def _arithmetic(kind: type, left: Any, right: Any, part: str) -> Any:
    if left is None or right is None:
        return None
    if not _is_number(left) or not _is_number(right):
        raise Refused(f"{part}: arithmetic is for numbers, this is {_kind(left)} and {_kind(right)}")
    if kind is ast.Pow and isinstance(left, int) and isinstance(right, int) and right * left.bit_length() > MAX_BITS:
        raise Refused(f"{part}: the number is too large")
    try:
        found = ARITHMETIC[kind][1](left, right)
    except ZeroDivisionError:
        return None
    except OverflowError as error:
        raise Refused(f"{part}: the number is too large") from error
    if isinstance(found, complex):
        return None
    if isinstance(found, int) and found.bit_length() > MAX_BITS:
        raise Refused(f"{part}: the number is too large")
    return found


def _compared(kind: type, left: Any, right: Any, part: str) -> bool:
    if kind in (ast.Eq, ast.Is):
        return bool(left == right) if kind is ast.Eq else left is right
    if kind in (ast.NotEq, ast.IsNot):
        return bool(left != right) if kind is ast.NotEq else left is not right
    if kind in (ast.In, ast.NotIn):
        return _contains(right, left, part) == (kind is ast.In)
    if left is None or right is None:
        return False
    try:
        return bool(ORDER[kind][1](left, right))
    except TypeError as error:
        raise Refused(f"{part}: {_kind(left)} cannot be compared with {_kind(right)}") from error


def _contains(holder: Any, entry: Any, part: str) -> bool:
    if holder is None or (entry is None and isinstance(holder, str)):
        return False
    try:
        return entry in holder
    except TypeError as error:
        raise Refused(f"{part}: {_kind(entry)} cannot be looked for in {_kind(holder)}") from error


def _called(name: str, arguments: list[Any], part: str) -> Any:
    first = arguments[0]
    if first is None:
        return None
    if name == "lower" and isinstance(first, str):
        return first.lower()
    if name == "len" and isinstance(first, str | list | dict):
        return len(first)
    if name == "abs" and _is_number(first):
        return abs(first)
    if name == "round" and _is_number(first):
        return _rounded(first, arguments[1] if len(arguments) > 1 else 0, part)
    raise Refused(f"{part}: {name} cannot take {_kind(first)}")


def _rounded(number: float, digits: Any, part: str) -> float:
    if not isinstance(digits, int) or abs(digits) > 20:
        raise Refused(f"{part}: the number of digits must lie in -20..20")
    return round(number, digits)


def _entry(holder: Any, key: str | int, part: str) -> Any:
    """None where there is no such entry."""
    if holder is None:
        return None
    if isinstance(holder, dict) and isinstance(key, str):
        return holder.get(key)
    if isinstance(holder, list | str) and isinstance(key, int):
        return holder[key] if -len(holder) <= key < len(holder) else None
    raise Refused(f"{part}: {_kind(holder)} has no entry {key!r}")


def _check_status(node: ast.Compare) -> None:
    """``status == 'trunkated'`` would be false for every sample."""
    if not (isinstance(node.left, ast.Name) and node.left.id == "status"):
        return
    for op, right in zip(node.ops, node.comparators, strict=True):
        is_list = isinstance(right, ast.Tuple | ast.List | ast.Set) and isinstance(op, ast.In | ast.NotIn)
        asked: list[ast.expr] = right.elts if is_list else [right] if isinstance(op, ast.Eq | ast.NotEq) else []  # type: ignore[attr-defined]
        for constant in asked:
            if isinstance(constant, ast.Constant) and constant.value not in STATUSES:
                near = _near(str(constant.value), STATUSES)
                raise Refused(f"{_source(node)}: status is one of {', '.join(STATUSES)}{near}")


def _is_singleton(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _kind(value: Any) -> str:
    names = {str: "a text", list: "a list", dict: "a table", type(None): "nothing", bool: "true or false"}
    return names.get(type(value), "a number")


def _near(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _source(node: ast.AST) -> str:
    try:
        return shown(ast.unparse(node))
    except RecursionError:
        return type(node).__name__


def shown(text: str, limit: int = 80) -> str:
    """``text`` for a one-line message."""
    line = text.encode("unicode_escape").decode("ascii") if not text.isprintable() else text
    return line if len(line) <= limit else line[: limit - 3] + "..."
