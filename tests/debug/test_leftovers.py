"""Leftovers are found through every alias, and nothing that merely looks like one (cases D11, D16)."""

import ast
import sys

import pytest

from vime.debug.leftovers.found import CannotParse, find
from vime.debug.leftovers.removal import remove


def found(text):
    """(line, column, name) of every leftover."""
    return [(one.leftover.line, one.leftover.column, one.leftover.name) for one in find(text).found]


def names(text):
    return [name for _, _, name in found(text)]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("breakpoint()", "breakpoint"),
        ("import builtins\nbuiltins.breakpoint()", "breakpoint"),
        ("import pdb; pdb.set_trace()", "pdb.set_trace"),
        ("import pdb as p\np.set_trace()", "pdb.set_trace"),
        ("from pdb import set_trace as x; x()", "pdb.set_trace"),
        ("from pdb import set_trace\nstop = set_trace\nstop()", "pdb.set_trace"),
        ("__import__('pdb').set_trace()", "pdb.set_trace"),
        ("import importlib\nimportlib.import_module('ray.util.rpdb').set_trace()", "ray.util.rpdb.set_trace"),
        ("import pdb\npdb.Pdb(nosigint=True).set_trace()", "pdb.Pdb().set_trace"),
        ("import pdb\ntry:\n    f()\nexcept E:\n    pdb.post_mortem()", "pdb.post_mortem"),
        ("import pdb\npdb.pm()", "pdb.pm"),
        ("import pdb\npdb.runcall(f)", "pdb.runcall"),
        ("try:\n    import ipdb as pdb\nexcept ImportError:\n    pdb = None\npdb.set_trace()", "ipdb.set_trace"),
        ("def f():\n    global pudb\n    import pudb\npudb.set_trace()", "pudb.set_trace"),
        (
            "from remote_pdb import RemotePdb\nRemotePdb('127.0.0.1', 4444).set_trace()",
            "remote_pdb.RemotePdb().set_trace",
        ),
        ("import web_pdb\nweb_pdb.set_trace()", "web_pdb.set_trace"),
        ("import ray\nray.util.pdb.set_trace()", "ray.util.pdb.set_trace"),
        ("from ray.util import pdb\npdb.post_mortem()", "ray.util.pdb.post_mortem"),
        ("from ray.util import rpdb\nrpdb.set_trace()", "ray.util.rpdb.set_trace"),
        ("import debugpy\ndebugpy.listen(5678)", "debugpy.listen"),
        ("from debugpy import wait_for_client as w\nw()", "debugpy.wait_for_client"),
        ("import debugpy\ndebugpy.breakpoint()", "debugpy.breakpoint"),
        ("import debugpy\ndebugpy.connect(('h', 1))", "debugpy.connect"),
        ("import pydevd\npydevd.settrace('h')", "pydevd.settrace"),
        ("import sys\nsys.breakpointhook = f", "sys.breakpointhook = ..."),
        ("import os\nos.environ['PYTHONBREAKPOINT'] = 'a.b'", "os.environ['PYTHONBREAKPOINT'] = ..."),
        ("from os import environ as e\ne.setdefault('PYTHONBREAKPOINT', x)", "os.environ.setdefault"),
        ("import os\nos.environ.update(PYTHONBREAKPOINT='a.b')", "os.environ.update"),
        ("import os\nos.environ.update({'PYTHONBREAKPOINT': 'a.b'})", "os.environ.update"),
        ("import ray\nray.init()", "ray.init"),
        ("import ray as r\nr.init(num_cpus=2)", "ray.init"),
        ("from ray import init\ninit('auto')", "ray.init"),
        ("import ray\nray.init(address='auto')", "ray.init"),
        ("import ray\nray.init(address=None)", "ray.init"),
        ("import ray\nray.init(address=a, ignore_reinit_error=True)", "ray.init"),
        ("x = [breakpoint() for _ in y]", "breakpoint"),
        ("class A:\n    breakpoint = 1\n    def f(self):\n        breakpoint()", "breakpoint"),
    ],
)
def test_every_kind_is_found(text, name):
    assert names(text) == [name]


@pytest.mark.parametrize(
    "text",
    [
        "'breakpoint()'  # breakpoint()",
        '"""\nimport pdb; pdb.set_trace()\n"""',
        "f'{x} breakpoint()'",
        "def breakpoint(): pass\nbreakpoint()",
        "def f(breakpoint):\n    breakpoint()",
        "from mine import breakpoint\nbreakpoint()",
        "from . import pdb\npdb.set_trace()",
        "self.breakpoint()",
        "class A:\n    breakpoint = f\n    breakpoint()",
        "pdb = Pdb()\npdb.set_trace()",
        "import pdb",
        "import pdb\nx = pdb.set_trace",
        "import ray\nray.init('10.0.0.1:6379')",
        "import ray\nray.init(address=address)",
        "import ray\nray.init(address='local')",
        "import ray\nray.init(**options)",
        "init()",
        "import os\nos.environ['PYTHONBREAKPOINT'] = '0'",
        "import os\nos.environ.setdefault('PYTHONBREAKPOINT', '0')",
        "import os\nos.environ['PATH'] = 'x'\nd['PYTHONBREAKPOINT'] = 'x'",
        "import sys\nsys.breakpointhook = sys.__breakpointhook__",
        "for breakpoint in x:\n    breakpoint()",
        "(breakpoint := f)\nbreakpoint()",
        "try:\n    f()\nexcept E as breakpoint:\n    breakpoint()",
        "match x:\n    case [*breakpoint]:\n        breakpoint()",
        "a = b\nb = a\na.set_trace()",
    ],
)
def test_what_only_looks_like_one_is_not_reported(text):
    assert names(text) == []


def test_places_are_those_an_editor_shows():
    text = "é = 'ü'; breakpoint()\r\nif é:\n\tbreakpoint()\x0c\rbreakpoint()\n# \u2028\nbreakpoint()"
    assert found(text) == [
        (1, 10, "breakpoint"),
        (3, 2, "breakpoint"),
        (4, 1, "breakpoint"),
        (6, 1, "breakpoint"),
    ]


def test_what_is_written_and_what_it_stands_for():
    (one,) = find("import pdb as p\np.set_trace(header='x' * 100)").found
    assert one.leftover.text == "p.set_trace(header='x' * 100), which is pdb.set_trace"
    (one,) = find(f"breakpoint({'x' * 100})").found
    assert one.leftover.what.endswith("...")
    assert len(one.leftover.what) == 60


def test_a_comment_keeps_its_line_and_a_string_does_not():
    text = "breakpoint()  # vime: keep\nbreakpoint('# vime: keep')\nbreakpoint(\n    1,  #vime:keep (on purpose)\n)"
    assert [one.leftover.is_kept for one in find(text).found] == [True, False, True]


@pytest.mark.parametrize("text", ["def f(:", "a\x00b", "print 'x'", "-" * 100_000 + "1", "x = '\\ud800'; ("])
def test_what_is_no_python_is_said(text):
    with pytest.raises(CannotParse, match=r"no valid Python|nested too deeply"):
        find(text)


@pytest.mark.parametrize("text", ["x = " + "+".join("a" * 1500), "if a: pass\n" + "elif b: pass\n" * 1000])
def test_generated_code_is_read_and_taken_out_of(text):
    limit = sys.getrecursionlimit()
    module = find(f"{text}\nbreakpoint()\n")
    assert remove(module).text == f"{text}\n"
    assert sys.getrecursionlimit() == limit


# Taking out

CUT = [
    ("a\nbreakpoint()\nb\n", "a\nb\n"),
    ("a\nbreakpoint()", "a\n"),
    ("import pdb; pdb.set_trace()\nb\n", "b\n"),
    ("a; breakpoint(); b  # c\n", "a; b  # c\n"),
    ("breakpoint(); a\n", "a\n"),
    ("a; breakpoint()\n", "a\n"),
    ("a; breakpoint();\n", "a;\n"),
    ("breakpoint();  # here\na\n", "a\n"),
    ("if a: breakpoint()\n", "if a: pass\n"),
    ("if a: breakpoint(); b\n", "if a: b\n"),
    ("if a:\n    # why\n    breakpoint()  # here\n", "if a:\n    # why\n    pass  # here\n"),
    ("if a:\n    b\nelse:\n    breakpoint()\n    breakpoint()\n", "if a:\n    b\nelse:\n    pass\n"),
    ("try:\n    a\nfinally:\n    breakpoint()\n", "try:\n    a\nfinally:\n    pass\n"),
    ("match a:\n    case 1:\n        breakpoint()\n", "match a:\n    case 1:\n        pass\n"),
    ("def f():\n    '''doc'''\n    breakpoint()\n", "def f():\n    '''doc'''\n"),
    ("a\r\nbreakpoint(\r\n    header='x',\r\n)\r\n\x0cb\r\n", "a\r\n\x0cb\r\n"),
    ("a\n\x0cbreakpoint()\nb", "a\n\x0cb"),
    ("a\rbreakpoint()\rb\r", "a\rb\r"),
    ("import os, pdb, sys\npdb.set_trace()\nos, sys\n", "import os, sys\nos, sys\n"),
    ("import os, pdb\npdb.set_trace()\nos\n", "import os\nos\n"),
    ("from pdb import (\n    pm,\n    set_trace,\n)\nset_trace()\npm\n", "from pdb import (\n    pm,\n)\npm\n"),
    ("def f():\n    import pdb\n    pdb.set_trace()\ndef g():\n    import pdb\n    pdb.x\n",
     "def f():\n    pass\ndef g():\n    import pdb\n    pdb.x\n"),
    ("import pdb\ndef f():\n    pdb.set_trace()\n    return 1\n", "def f():\n    return 1\n"),
    ("import pdb\n__all__ = ['pdb']\npdb.set_trace()\n", "import pdb\n__all__ = ['pdb']\n"),
    ("import ray\ndef f(x: 'list[ray.X]'): pass\nray.init()\n", "import ray\ndef f(x: 'list[ray.X]'): pass\n"),
    ("import pdb  # vime: keep\npdb.set_trace()\n", "import pdb  # vime: keep\n"),
    ("import sys\nsys.breakpointhook = None\n", ""),
    ("é = 'ü'; breakpoint(); ö = 1\n", "é = 'ü'; ö = 1\n"),
    ("\tbreakpoint()\n".join(["if a:\n", "\tb\n"]), "if a:\n\tb\n"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), CUT)
def test_taken_out_and_nothing_else_touched(text, expected):
    done = remove(find(text))
    assert done.text == expected
    assert done.left == ()
    assert names(expected) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = breakpoint()\n", "is part of an expression"),
        ("a or breakpoint()\n", "is part of an expression"),
        ("f = lambda: breakpoint()\n", "is part of an expression"),
        ("import ray\nray.init(num_cpus=2)\n", "has arguments"),
        ("import pdb\npdb.runcall(train)\n", "runs something"),
        ("breakpoint(header=f())\n", "its arguments do something themselves"),
        ("import sys\nsys.breakpointhook = f()\n", "its arguments do something themselves"),
        ("import sys\nx = sys.breakpointhook = f\n", "assigns to something else"),
        ("while True:\n    breakpoint()\n", "the loop has no end"),
        ("a\n\\\nbreakpoint()\nb\n", "continues the one above"),
    ],
)
def test_what_cannot_be_taken_out_stays_with_its_reason(text, reason):
    done = remove(find(text))
    assert done.text == text
    ((_, said),) = done.left
    assert reason in said


def test_one_that_must_stay_does_not_hold_the_others():
    done = remove(find("breakpoint()\nwhile a:\n    breakpoint()\nx = breakpoint()\nbreakpoint()\nb\n"))
    assert done.text == "while a:\n    breakpoint()\nx = breakpoint()\nb\n"
    assert [leftover.line for leftover, _ in done.left] == [3, 4]
    assert [leftover.line for leftover in done.removed] == [1, 5]


def test_a_comment_between_names_keeps_the_import():
    text = "from pdb import (\n    pm,  # used\n    set_trace,\n)\npm\n"
    assert remove(find(text + "set_trace()\n")).text == text


def test_kept_ones_stay():
    text = "breakpoint()  # vime: keep\n"
    done = remove(find(text))
    assert (done.text, done.removed, done.left) == (text, (), ())
    assert ast.parse(done.text)
