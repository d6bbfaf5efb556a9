"""Whatever the source looks like: what --fix leaves is Python, has only what was reported, and is the same program."""

import ast
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vime
from vime.debug.leftovers.found import find, split_lines
from vime.debug.leftovers.removal import remove

LEFTOVERS = [
    "breakpoint()",
    "pdb.set_trace()",
    "breakpoint(header='é')",
    "stop()",
    "debugpy.listen(5678)",
    "r.init()",
    "x = breakpoint()",
    "a or pdb.set_trace()",
    "breakpoint(f())",
    "sys.breakpointhook = None",
]
OTHERS = ["a = 1", "f(x)", "'breakpoint()'", "pass", "é = 'ü'", "x = [1,\n2]", "pdb.x", "'''b\nreakpoint()'''"]
IMPORTS = [
    "import pdb",
    "import os, debugpy",
    "from pdb import set_trace as stop",
    "import ray as r, sys",
    "import sys",
]
HEADERS = ["if a", "while a", "for i in y", "def f()", "class C", "with z", "try", "async def g()"]
TRACED = {"pdb", "debugpy", "stop", "r", "sys"}

simple = st.sampled_from(LEFTOVERS + OTHERS + IMPORTS)
comment = st.sampled_from(["", "", "  # breakpoint()", " #é", ";", "; # x"])


@st.composite
def lines(draw, depth=0):
    """Lines of one block, without indentation of their own."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.integers(0, 9))
        if kind == 0:
            found.append(draw(st.sampled_from(["", "# breakpoint()", "\x0c"])))
        if kind <= 1 and depth < 3:
            header = draw(st.sampled_from(HEADERS))
            found.append(f"{header}:{draw(st.sampled_from(['', ' # pdb.set_trace()']))}")
            found += [f"    {line}" for line in draw(lines(depth + 1))]
            if header == "try":
                found += ["finally:", *(f"    {line}" for line in draw(lines(depth + 1)))]
        elif kind == 2:
            found.append(f"if b: {'; '.join(draw(st.lists(simple, min_size=1, max_size=3)))}{draw(comment)}")
        else:
            separator = draw(st.sampled_from(["; ", ";", " ;  "]))
            found.append(separator.join(draw(st.lists(simple, min_size=1, max_size=3))) + draw(comment))
    return found


@st.composite
def sources(draw):
    text = draw(st.sampled_from(["\n", "\r\n", "\r"])).join([*draw(lines()), "end"])
    return text + draw(st.sampled_from(["", "\n"]))


def stripped(tree, places):
    """The program without statements at ``places``, without imports of what leftovers use, and without pass."""

    def is_gone(node):
        names = {a.asname or a.name for a in getattr(node, "names", ())} if not isinstance(node, ast.Global) else set()
        at = getattr(node, "value", node) if isinstance(node, ast.Expr) else node
        return (
            (at.lineno, at.col_offset) in places or isinstance(node, ast.Pass) or (names and names <= TRACED | {"os"})
        )

    for node in list(ast.walk(tree)):
        for name in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(node, name, None), list):
                block[:] = [statement for statement in block if not is_gone(statement)]
    return ast.dump(tree)


def columns(text, leftovers):
    """Places as a tree has them: columns in bytes."""
    every = split_lines(text)
    return {(one.line, len(every[one.line - 1][: one.column - 1].encode())) for one in leftovers}


@settings(max_examples=400, deadline=None)
@given(sources())
def test_the_same_program_without_its_leftovers(text):
    before = find(text)
    done = remove(before)
    after = find(done.text)
    assert [one.leftover.name for one in after.found] == [leftover.name for leftover, _ in done.left]
    assert len(done.removed) + len(done.left) == len(before.found)
    expected = stripped(ast.parse(text), columns(text, done.removed))
    assert stripped(ast.parse(done.text), set()) == expected
    assert remove(after).text == done.text  # a second time there is nothing to do


@settings(max_examples=200, deadline=None)
@given(sources())
def test_lines_without_leftovers_stay_byte_for_byte(text):
    module = find(text)
    touched = {n for one in module.found for n in range(one.node.lineno, one.node.end_lineno + 1)}
    touched |= {s.lineno for s in ast.walk(module.tree) if isinstance(s, ast.Import | ast.ImportFrom)}
    clean = [line for number, line in enumerate(split_lines(text), 1) if number not in touched]
    left = iter(split_lines(remove(module).text))
    assert all(any(line == other for other in left) for line in clean)


@settings(max_examples=200, deadline=None)
@given(sources())
def test_no_import_of_a_debugger_is_left_unused_by_it(text):
    """An import whose every use was taken out went with it."""
    done = remove(find(text))
    used = {node.id for node in ast.walk(ast.parse(done.text)) if isinstance(node, ast.Name)}
    used_before = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    imported = {
        a.asname or a.name
        for node in ast.parse(done.text).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for a in node.names
    }
    bound = [
        a.asname or a.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for a in node.names
    ]
    once = {name for name in TRACED if bound.count(name) == 1}  # of others the use may have been another import's
    assert not (imported & (used_before - used) & once)


def planted(text, seed):
    """``text`` with lines of leftovers before statements drawn by ``seed``, and how many."""
    chosen = random.Random(seed)
    every = split_lines(text)
    places = {}
    for node in ast.walk(ast.parse(text)):
        for name in ("body", "orelse", "finalbody"):
            for statement in getattr(node, name, None) or () if not isinstance(node, ast.Lambda | ast.IfExp) else ():
                line = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ()))])
                indent = every[line - 1][: len(every[line - 1]) - len(every[line - 1].lstrip(" \t"))]
                is_elif = every[line - 1].lstrip().startswith("elif")
                if not is_elif and len(indent) == statement.col_offset and not every[line - 2].endswith("\\\n"):
                    places[line] = indent
    lines = [line for line in sorted(places) if chosen.random() < 0.1]
    for line in reversed(lines):
        leftover = chosen.choice(
            ["breakpoint()", "import pdb; pdb.set_trace()", "breakpoint()  # see here", "breakpoint();"]
        )
        every.insert(line - 1, f"{places[line]}{leftover}\n")
    return "".join(every), len(lines)


FILES = sorted((Path(vime.__file__).parent / "debug").glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_was_planted_in_real_files_is_taken_out_again(file):
    text = file.read_text(encoding="utf-8")
    dirty, number = planted(text, seed=file.name)
    done = remove(find(dirty))
    assert len(done.removed) == number
    assert done.text == text
