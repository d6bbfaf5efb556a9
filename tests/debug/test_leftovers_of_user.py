"""Leftovers in the modules a configuration names (case D16): found without importing them."""

import sys

import pytest

from vime.config.load import read
from vime.debug.leftovers.user_modules import user_leftovers
from vime.debug.stop.spec import Spec
from vime.reward.breakpoints import DEBUG_SPEC

RUN = """
[model]
path = "model"
[data]
prompts = ["prompts.jsonl"]
[run]
num_rollouts = 1
"""


@pytest.fixture
def leftovers(tmp_path, monkeypatch):
    """Write files, then ask for what ``settings`` names; no module is imported by that."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    (tmp_path / "run.toml").write_text(RUN)

    def ask(files, *settings):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        before = set(sys.modules)
        found = user_leftovers(read([tmp_path / "run.toml"], settings).config, [str(tmp_path)])
        assert not {name for name in set(sys.modules) - before if name.startswith(("mine", "beside", "pack"))}
        return found

    return ask


USER = ('reward.name="user"', 'reward.function="mine:score"')


def test_the_module_and_those_beside_it(leftovers):
    files = {
        "mine.py": "import beside\nbreakpoint()\nraise SystemExit\n",
        "beside.py": "from pack import inner\nimport pdb\npdb.set_trace()  # vime: keep\npdb.set_trace()\n",
        "pack/__init__.py": "",
        "pack/inner.py": "from . import deeper\nfrom .other import x\n",
        "pack/deeper.py": "import ray\nray.init()\n",
        "pack/other.py": "import debugpy\nx = 1\ndebugpy.listen(1)\n",
        "pack/unused.py": "breakpoint()\n",
        "lonely.py": "breakpoint()\n",
    }
    found = leftovers(files, *USER)
    assert sorted(found.warnings()) == [
        "breakpoint() in mine.py:2 is ignored outside debug runs; vime debug-attach check --fix mine.py takes it out",
        "debugpy.listen(1) in pack/other.py:3 is ignored outside debug runs; "
        "vime debug-attach check --fix pack/other.py takes it out",
        "pdb.set_trace() in beside.py:4 is ignored outside debug runs; "
        "vime debug-attach check --fix beside.py takes it out",
        "ray.init() in pack/deeper.py:2 is not ignored: it starts a second Ray cluster or joins whichever is found",
    ]
    assert sorted(found.ignored.calls) == ["debugpy.listen", "pdb.set_trace"]
    assert len(found.ignored.places) == 3


def test_generate_functions_and_submodules(leftovers):
    files = {"pack/__init__.py": "breakpoint()\n", "pack/mine.py": "x = [breakpoint()]\n"}
    found = leftovers(files, 'rollout.generate="pack.mine:generate"')
    assert [(one.file.rpartition("pack/")[2], one.line) for one in found.leftovers] == [
        ("__init__.py", 1),
        ("mine.py", 1),
    ]


def test_each_file_once(leftovers):
    found = leftovers({"mine.py": "import mine\nbreakpoint()\n"}, *USER, 'rollout.generate="mine:generate"')
    assert len(found.leftovers) == 1


def test_what_is_not_loaded_is_not_looked_at(leftovers):
    files = {"mine.py": "breakpoint()\n"}
    assert leftovers(files).leftovers == ()
    replayed = leftovers(files, *USER, "debug.train_only=true", "debug.load_rollout_data='d_{rollout_id}.pt'")
    assert replayed.leftovers == ()


def test_libraries_are_not_the_users(leftovers):
    """torch holds breakpoints of its own; Python's pdb does too."""
    assert leftovers({"mine.py": "import torch._dynamo.utils, pdb, vime.types\n"}, *USER).leftovers == ()
    assert leftovers({}, 'reward.name="user"', 'reward.function="nonesuch:score"').leftovers == ()
    assert leftovers({}, 'reward.name="user"', 'reward.function="json:dumps"').leftovers == ()


def test_what_cannot_be_read_is_said(leftovers):
    found = leftovers({"mine.py": "import beside\n", "beside.py": "def f(:\n"}, *USER)
    assert [line.partition(" at line")[0] for line in found.warnings()] == [
        "beside.py: not checked for breakpoints: no valid Python"
    ]


def test_in_a_debug_run_only_what_is_never_ignored_is_warned_about(leftovers, monkeypatch):
    monkeypatch.setenv("PYTHONBREAKPOINT", "my.hook")
    found = leftovers({"mine.py": "import ray\nbreakpoint()\nray.init()\n"}, *USER)
    assert [line.partition(" in ")[0] for line in found.warnings()] == ["ray.init()"]


def test_a_run_of_debug_attach_says_what_stops_it_and_what_is_ignored_all_the_same(leftovers, monkeypatch):
    monkeypatch.setenv(DEBUG_SPEC, Spec("d-1").dumps())
    found = leftovers({"mine.py": "import pdb, ray\nbreakpoint()\npdb.set_trace()\nray.init()\n"}, *USER)
    assert sorted(found.warnings())[:2] == [
        "breakpoint() in mine.py:2 stops this debug run",
        "pdb.set_trace() in mine.py:3 is ignored in a debug run, where breakpoint() stops",
    ]
