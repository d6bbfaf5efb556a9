"""Where points land, and that code with points is the same program."""

import ast
import contextlib
import io
import sys
import textwrap
import types
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.debug.stop import hit as hit_module
from vime.debug.stop.instrument import NoPlace, Place, instrument, places
from vime.debug.stop.spec import Point

SOURCE = textwrap.dedent(
    '''
    """Doc."""
    from __future__ import annotations
    import os

    X: int
    Y = 1

    @staticmethod
    @property
    def decorated(a,
                  b=1):
        """Doc."""

        # comment
        return (a +
                b)

    class C:
        """Doc."""

        z = 3

        class D:
            def f(self): return 1

            async def g(self):
                async with self as x:
                    await x

    def only_doc():
        """Doc."""

    def flow(x):
        global Y
        if x == 1:
            a = 1
        elif x == 2:
            a = 2
        else:
            a = 3
        try:
            b = 1
        except ValueError:
            b = 2
        else:
            b = 3
        finally:
            c = 4
        match x:
            case 1:
                d = 1
            case _:
                d = 2
        for i in range(3):
            e = i
        while x: x -= 1; y = x
        f = lambda q: q + 1
        with open(os.devnull) as g, \\
                open(os.devnull) as h:
            yield g

    if Y: Z = 2
    '''
).lstrip("\n")
LINES = SOURCE.splitlines()


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(LINES, 1) if text in line)


def at(line: int, source: str = SOURCE) -> Place:
    place = places(source, [Point("p0", "t", "f.py", line)])[0]
    assert isinstance(place, Place), place
    return place


@pytest.mark.parametrize(
    ("asked", "landed"),
    [
        ('"""Doc."""', "import os"),
        ("from __future__", "import os"),
        ("X: int", "Y = 1"),
        ("@staticmethod", "@staticmethod"),
        ("@property", "@staticmethod"),
        ("def decorated", "@staticmethod"),
        ("b=1):", "@staticmethod"),
        ("# comment", "return (a +"),
        ("            b)", "return (a +"),
        ("class C", "class C"),
        ("def f(self)", "def f(self)"),
        ("async with", "async with"),
        ("global Y", "if x == 1"),
        ("elif x == 2", "elif x == 2"),
        ("    a = 3", "    a = 3"),
        ("    try:", "    try:"),
        ("except ValueError", "    b = 2"),
        ("finally:", "    c = 4"),
        ("match x", "match x"),
        ("case _", "    d = 2"),
        ("for i", "for i"),
        ("while x", "while x"),
        ("f = lambda", "f = lambda"),
        ("open(os.devnull) as h", "with open"),
        ("if Y: Z", "if Y: Z"),
    ],
)
def test_a_line_lands_on_its_statement(asked: str, landed: str) -> None:
    assert at(line_of(asked)).line == line_of(landed)


def test_an_else_lands_inside() -> None:
    number = line_of("    else:")
    assert at(number).line == number + 1


def test_notes_and_functions() -> None:
    assert at(line_of("    a = 2")).function == "flow"
    assert at(line_of("await x")).function == "C.D.g"
    assert at(line_of("Y = 1")) == Place(line_of("Y = 1"))
    inside = line_of("e = i")
    assert at(line_of("for i")).note == f"stops once, before the loop starts; line {inside} is the first inside"
    body = line_of("return (a +")
    note = f"stops where decorated is defined, not where it is called: that would be line {body}"
    assert at(line_of("def decorated")).note == note
    assert "where class C is defined" in at(line_of("class C")).note
    assert "where the lambda is made" in at(line_of("f = lambda")).note


@pytest.mark.parametrize(
    ("name", "landed"),
    [
        ("decorated", "return (a +"),
        ("C.D.f", "def f(self)"),
        ("C.D.g", "async with"),
        ("flow", "if x == 1"),
        ("C", "z = 3"),
    ],
)
def test_a_function_lands_behind_its_docstring(name: str, landed: str) -> None:
    place = places(SOURCE, [Point("p0", "t", module="m", qualname=name)])[0]
    assert isinstance(place, Place)
    assert place.line == line_of(landed)
    assert place.note == ""


def test_what_is_not_there_is_said_with_what_is() -> None:
    missing = places(SOURCE, [Point("p0", "t", module="m", qualname="g"), Point("p1", "t", "f.py", 999)])
    assert isinstance(missing[0], NoPlace)
    assert str(missing[0]) == "no function 'g'"
    assert missing[0].near[0] == "C.D.g"
    assert isinstance(missing[1], NoPlace)
    assert str(missing[1]) == f"no statement at or after line 999: the last one ends at line {len(LINES)}"


def run(source: str, points: list[Point], name: str = "m") -> tuple[list[tuple[str, int]], dict]:
    """(hits with the line that is traced next in that frame, names of the module)."""
    code, _ = instrument(source, "f.py", points)
    hits: list[tuple[str, int]] = []
    pending: list[str] = []

    def record(point: str) -> None:
        pending.append(point)

    def trace(frame, event, _argument):  # type: ignore[no-untyped-def]
        if frame.f_code.co_filename != "f.py":
            return None
        if event == "line" and pending:
            hits.append((pending.pop(), frame.f_lineno))
        return trace

    module = types.ModuleType(name)
    before, hit_module.hit = hit_module.hit, record
    old = sys.gettrace()
    sys.settrace(trace)
    try:
        exec(code, module.__dict__)
    finally:
        sys.settrace(old)
        hit_module.hit = before
    assert not pending
    return hits, module.__dict__


def test_a_debugger_stops_on_the_line_itself() -> None:
    source = "x = 1\ny = 2; z = 3\ndef f():\n    '''Doc.'''\nf()\nclass A:\n    'doc'\n    b = 4\nif y:\n    w = 1\n"
    points = [Point(f"p{n}", "t", "f.py", n) for n in (1, 2, 4, 8, 10)]
    hits, names = run(source, points)
    assert hits == [("p1", 1), ("p2", 2), ("p4", 4), ("p8", 8), ("p10", 10)]
    assert names["f"].__doc__ == "Doc."
    assert names["A"].__doc__ == "doc"


def test_several_points_on_a_line_are_hit_in_order() -> None:
    code, _ = instrument("x = 1\n", "f.py", [Point("p0", "t", "f.py", 1), Point("p1", "t", "f.py", 1)])
    seen: list[str] = []
    before, hit_module.hit = hit_module.hit, seen.append
    try:
        exec(code, {})
    finally:
        hit_module.hit = before
    assert seen == ["p0", "p1"]


MODULES = ("ast", "heapq", "textwrap", "dataclasses", "asyncio/tasks")
STDLIB = [Path(ast.__file__).parent / f"{name}.py" for name in MODULES]


@pytest.mark.parametrize("path", STDLIB, ids=lambda path: path.stem)
def test_every_line_of_real_modules_compiles(path: Path) -> None:
    source = path.read_bytes()
    last = max(s.end_lineno or 0 for s in ast.parse(source).body)
    points = [Point(f"p{n}", "t", str(path), n) for n in range(1, last + 1)]
    _, landed = instrument(source, str(path), points)
    lines = {s.lineno for s in ast.walk(ast.parse(source)) if isinstance(s, ast.stmt)}
    lines |= {d.lineno for s in ast.walk(ast.parse(source)) for d in getattr(s, "decorator_list", [])}
    assert all(isinstance(place, Place) and place.line in lines for place in landed)


PROGRAM = textwrap.dedent(
    '''
    """Doc."""
    from __future__ import annotations
    import heapq

    def gen(n):
        """Doc."""
        total = 0
        for i in range(n):
            got = yield i
            total += got or 1
        return total

    class Stack:
        """Doc."""
        __slots__ = ("items",)

        def __init__(self):
            self.items = []

        def push(self, x):
            try:
                heapq.heappush(self.items, x)
            except TypeError:
                return False
            else:
                return True
            finally:
                self.items = self.items[:5]

    def kind(x):
        match x:
            case int() if x > 2:
                return "big"
            case int():
                return "small"
            case [first, *rest]:
                return f"list {first} {len(rest)}"
            case _:
                pass
        return "other"

    stack = Stack()
    pushed = [stack.push(x) for x in (5, 1, "a", 3, 2, 7, 0)]
    kinds = [kind(x) for x in (1, 3, [1, 2], None)]
    numbers = list(gen(4))
    def outer():
        z = 1
        def inner():
            nonlocal z
            z += 1
            return z
        return inner() + inner()
    out = outer()
    while out > 3: out -= 1
    print(pushed, kinds, numbers, out, stack.items, __doc__, Stack.__doc__, gen.__doc__)
    '''
).lstrip("\n")


def output(code: types.CodeType) -> str:
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        exec(code, {"__name__": "m"})
    return stream.getvalue()


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(1, len(PROGRAM.splitlines())), min_size=1, max_size=12))
def test_a_program_with_points_says_the_same(lines: set[int]) -> None:
    points = [Point(f"p{n}", "t", "f.py", n) for n in sorted(lines)]
    code, _ = instrument(PROGRAM, "f.py", points)
    before, hit_module.hit = hit_module.hit, lambda _point: None
    try:
        assert output(code) == output(compile(PROGRAM, "f.py", "exec", dont_inherit=True))
    finally:
        hit_module.hit = before


def test_every_point_of_the_program_that_is_reached_is_on_its_line() -> None:
    number = len(PROGRAM.splitlines())
    checked = 0
    for line in range(1, number + 1):
        point = Point("p0", "t", "f.py", line)
        place = places(PROGRAM, [point])[0]
        assert isinstance(place, Place)
        with contextlib.redirect_stdout(io.StringIO()):
            hits, _ = run(PROGRAM, [point])
        assert all(found == place.line for _, found in hits), (line, place, hits)
        checked += len(hits)
    assert checked > 60
