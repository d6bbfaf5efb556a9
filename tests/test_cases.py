"""docs/cases.md names tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([A-Z]\d\d) \| (.+?) \| (.+) \|$", TABLE, re.MULTILINE)


@cache
def functions(path):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def absent(names):
    """Those of ``path::name`` that are no test function of a file."""
    split = [name.split("::") for name in names]
    return ["::".join(s) for s in split if not (ROOT / s[0]).is_file() or s[1] not in functions(s[0])]


def test_every_row_is_read():
    assert len(ROWS) == len([line for line in TABLE.splitlines() if line.startswith("| ")]) - 1
    assert len({case for case, _, _ in ROWS}) == len(ROWS)


def test_every_named_test_exists():
    for case, _, tests in ROWS:
        names = re.findall(r"`([^`]+)`", tests)
        assert names, case
        assert absent(names) == [], case


def test_a_test_that_is_gone_is_found():
    assert absent(["tests/test_cases.py::test_nothing", "tests/none.py::test_a", "tests/test_cases.py::absent"]) == [
        "tests/test_cases.py::test_nothing",
        "tests/none.py::test_a",
    ]
