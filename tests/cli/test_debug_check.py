"""``vime debug-attach check``: what it prints and how it ends (case D16)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_app import HEAVY, loaded_modules, vime

import vime as package

ROOT = Path(package.__file__).parents[1]
TREE = {
    "train.py": "import ray\nray.init()\n\n\ndef main():\n    breakpoint()  # is it here?\n    return 1\n",
    "reward.py": 'import pdb; pdb.set_trace()\n"""breakpoint()"""  # pdb.set_trace()\nx = 1\n',
    "sub/hang.py": "import ray\nfrom ray.util import pdb\nray.util.pdb.set_trace()\nx = pdb.set_trace()\n",
    "clean.py": "ray.init('10.0.0.1:6379')\nself.breakpoint()\n",
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def check(*arguments):
    return vime("debug-attach", "check", *map(str, arguments))


def places(result):
    return [line.partition(": ")[0] for line in result.stdout.splitlines()]


def test_every_leftover_with_its_place_and_no_namesake(tree):
    result = check(".")
    assert result.exit_code == 1
    assert places(result) == [
        "./reward.py:1:13",
        "./train.py:2:1",
        "./train.py:6:5",
        "./sub/hang.py:3:1",
        "./sub/hang.py:4:5",
    ]
    assert result.stdout.splitlines()[0] == (
        "./reward.py:1:13: pdb.set_trace(): stops the process until somebody answers; without a terminal it ends it"
    )
    assert result.stderr.startswith("error: 5 leftovers in 3 of 4 files\nhint: --fix takes out what stands alone")
    assert {name: (tree / name).read_text() for name in TREE} == TREE


def test_a_clean_tree_passes(tree):
    result = check("clean.py")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "no leftovers in 1 file\n"


def test_fix_takes_out_what_stands_alone_and_names_the_rest(tree):
    result = check(".", "--fix")
    assert result.exit_code == 1
    assert places(result) == ["./sub/hang.py:2:5"]
    assert result.stdout.endswith("; not removed: is part of an expression\n")
    assert "./train.py:6:5: removed breakpoint()" in result.stderr.splitlines()
    assert "./train.py: removed the import of ray, which nothing else uses" in result.stderr.splitlines()
    assert "error: 4 removed, 1 leftover in 1 of 4 files" in result.stderr
    assert (tree / "train.py").read_text() == "\n\ndef main():\n    return 1\n"
    assert (tree / "reward.py").read_text() == '"""breakpoint()"""  # pdb.set_trace()\nx = 1\n'
    assert (tree / "sub" / "hang.py").read_text() == "from ray.util import pdb\nx = pdb.set_trace()\n"
    assert (tree / "clean.py").read_text() == TREE["clean.py"]


def test_fix_of_everything_passes(tree):
    assert check("train.py", "reward.py", "--fix").exit_code == 0
    result = check("train.py", "reward.py")
    assert (result.exit_code, result.stderr) == (0, "no leftovers in 2 files\n")


def test_as_json(tree):
    (tree / "train.py").write_text("breakpoint()  # vime: keep\n")
    (tree / "clean.py").write_text("def f(:\n")
    result = check(".", "--fix", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert found["num_files"] == 3
    assert [(row["file"], row["line"], row["column"]) for row in found["kept"]] == [("./train.py", 1, 1)]
    ((row),) = found["leftovers"]
    assert (row["name"], row["not_removed"]) == ("ray.util.pdb.set_trace", "is part of an expression")
    assert [(row["file"], row["imports"]) for row in found["removed"]] == [
        ("./reward.py", ["pdb"]),
        ("./sub/hang.py", ["ray"]),
    ]
    assert [row["file"] for row in found["not_checked"]] == ["./clean.py"]


def test_a_file_that_cannot_be_read_is_no_pass(tree):
    (tree / "clean.py").write_text("def f(:\n")
    (tree / "fine.py").write_text("x = 1\n")
    result = check("clean.py", "fine.py")
    assert result.exit_code == 1
    assert result.stdout.startswith("clean.py: not checked: no valid Python at line 1")
    assert "none in 1 file, 1 not checked" in result.stderr
    result = check("clean.py")
    assert result.exit_code == 2
    assert "nothing was checked: no valid Python at line 1" in result.stderr


@pytest.mark.parametrize("arguments", [[], ["none.py"], ["empty"], ["-", "--fix"]])
def test_wrong_usage(tree, arguments):
    (tree / "empty").mkdir()
    assert check(*arguments).exit_code == 2


def test_standard_input(tree):
    command = [sys.executable, "-m", "vime_cli", "debug-attach", "check", "-"]
    options = {"capture_output": True, "timeout": 60, "env": {"PYTHONPATH": str(ROOT)}}
    done = subprocess.run(command, input="# coding: latin-1\né; breakpoint()".encode("latin-1"), **options)
    assert done.returncode == 1
    assert done.stdout.startswith(b"<stdin>:2:4: breakpoint()")
    assert subprocess.run(command, input=b"", **options).returncode == 0


def test_names_that_no_encoding_takes(tree):
    """Not even a file name that is no text stops the list."""
    Path("b\udce9d.py").write_text("breakpoint()\n")
    command = [sys.executable, "-m", "vime_cli", "debug-attach", "check", "b\udce9d.py"]
    for more in ([], ["--json"], ["--fix"]):
        environment = {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
        done = subprocess.run([*command, *more], capture_output=True, timeout=60, env=environment)
        assert done.returncode == (0 if more == ["--fix"] else 1)
        assert b"Traceback" not in done.stderr
        assert b"b\\udce9d.py" in done.stdout + done.stderr


def test_the_group_prints_its_help_and_loads_nothing_heavy():
    assert "check" in vime("debug-attach").stdout + vime("debug-attach").stderr
    assert vime("debug-attach", "--help").exit_code == 0
    for arguments in (
        ["debug-attach", "--help"],
        ["debug-attach", "check", "--help"],
        ["debug-attach", "check", __file__],
    ):
        assert not loaded_modules(*arguments) & {*HEAVY}


def test_the_hook_for_pre_commit_calls_this_command():
    yaml = pytest.importorskip("yaml")
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert (hook["id"], hook["types"], hook["language"]) == ("vime-leftovers", ["python"], "python")
    program, *arguments = hook["entry"].split()
    assert program == "vime"
    assert vime(*arguments, __file__).exit_code == 0
