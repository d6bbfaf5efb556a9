"""Breakpoints are ignored outside debug runs, whoever set PYTHONBREAKPOINT (cases D01, D06, D16)."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import vime
from vime.config import schema
from vime.reward.breakpoints import Ignored
from vime.reward.pool import RewardPool
from vime.types import Sample

ROOT = Path(vime.__file__).parents[1]
RAYS = "ray.util.rpdb.set_trace"


def python(code, **environment):
    """(exit code, stderr) of ``code`` after ``from vime.reward.breakpoints import *``, without a terminal."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_DEBUG", "PYTHONBREAKPOINT"))}
    start = "from vime.reward.breakpoints import *; import os, sys\n"
    done = subprocess.run(
        [sys.executable, "-c", start + code],
        env=kept | {"PYTHONPATH": str(ROOT)} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stderr


LINE = "warning: breakpoint() in <string>:3 is ignored outside debug runs\n"


def test_without_it_python_ends_the_process():
    code, error = python("\nbreakpoint()")
    assert code == 1
    assert "BdbQuit" in error


@pytest.mark.parametrize("before", [{}, {"PYTHONBREAKPOINT": ""}, {"PYTHONBREAKPOINT": RAYS}])
def test_breakpoints_are_ignored_and_said_once(before):
    """Also where a Ray job leaves its own hook behind, which no process but a worker can use (case D01)."""
    assert python("ignore()\nfor _ in range(3): breakpoint()", **before) == (0, LINE)


def test_children_inherit_it():
    code = "ignore(); import subprocess\nsubprocess.run([sys.executable, '-c', '\\n\\nbreakpoint()'], check=True)"
    assert python(code) == (0, LINE)


def test_a_hook_of_the_users_stays():
    code = "ignore(Ignored(('pdb.set_trace',)))\nbreakpoint('mine', file=sys.stderr)\nimport pdb; pdb.set_trace()"
    done, error = python(code, PYTHONBREAKPOINT="builtins.print")
    assert error.startswith("mine\n")
    assert (done, "BdbQuit" in error) == (1, True)
    assert python("ignore()\nbreakpoint()", PYTHONBREAKPOINT="0") == (0, "")


def test_calls_are_replaced_before_they_are_imported_by_name():
    calls = ("pdb.set_trace", "debugpy.listen", "debugpy.wait_for_client", "nonesuch.set_trace")
    code = (
        f"ignore(Ignored({calls}))\nfrom pdb import set_trace; import debugpy\n"
        "host, port = debugpy.listen(('0.0.0.0', 0))\ndebugpy.wait_for_client()\nset_trace()"
    )
    done, error = python(code)
    assert done == 0
    said = [line.split()[1] for line in error.splitlines()]
    assert said == ["debugpy.listen()", "debugpy.wait_for_client()", "pdb.set_trace()"]


def test_rays_breakpoints_are_ignored_with_it_and_stay_where_its_debugger_is_wanted():
    assert python("ignore(); print(os.environ['RAY_DEBUG'], file=sys.stderr)") == (0, "0\n")
    for name in ("RAY_DEBUG", "RAY_DEBUG_POST_MORTEM"):
        code = f"os.environ[HOOK] = {RAYS!r}; ignore_in_worker(); print(os.environ[HOOK], file=sys.stderr)"
        assert python(code, **{name: "1"}) == (0, f"{RAYS}\n")
        assert python(code) == (0, "vime.reward.breakpoints.ignored\n")


def test_connecting_to_ray_does_not_bring_its_hook_back():
    code = f"ignore()\nwith hook_kept(): os.environ[HOOK] = {RAYS!r}\nprint(os.environ[HOOK], file=sys.stderr)"
    assert python(code) == (0, "vime.reward.breakpoints.ignored\n")
    assert python(code, RAY_DEBUG="1") == (0, f"{RAYS}\n")
    assert python(code, PYTHONBREAKPOINT="my.hook") == (0, "my.hook\n")


FORGETFUL = """
import pdb
breakpoint()

def score(sample):
    breakpoint()
    pdb.set_trace()
    return 1.0
"""


@pytest.mark.parametrize("hook", [None, RAYS])
def test_a_reward_with_breakpoints_scores(tmp_path, monkeypatch, capfd, hook):
    """The worker says each place once, but for those that were told before."""
    (tmp_path / "forgetful_reward.py").write_text(FORGETFUL)
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    if hook:
        monkeypatch.setenv("PYTHONBREAKPOINT", hook)
    config = schema.Reward(name="user", function="forgetful_reward:score", num_workers=1, timeout_seconds=20)
    ids, mask, log_probs = np.array([1, 2], np.int32), np.array([False, True]), np.array([0.0, -1.0], np.float32)
    sample = Sample(0, 0, ids, 1, mask, log_probs)
    told = Ignored((), (f"{tmp_path}/forgetful_reward.py:3",))
    with RewardPool(config, [str(tmp_path)], told) as pool:
        assert pool.score([[sample, sample]]) == [[1.0, 1.0]]
    lines = [line for line in capfd.readouterr().err.splitlines() if "ignored" in line]
    assert lines == [
        f"warning: {name} in {tmp_path}/forgetful_reward.py:{line} is ignored outside debug runs"
        for name, line in (("breakpoint()", 6), ("pdb.set_trace()", 7))
    ]


def test_in_a_run_of_debug_attach_other_debuggers_are_ignored_and_breakpoint_is_not():
    code = "sys.breakpointhook = lambda: print('stopped', file=sys.stderr)\nignore(Ignored(('pdb.set_trace',)))\n"
    code += "breakpoint()\nimport pdb; pdb.set_trace()"
    spec = {"VIME_DEBUG_SPEC": '{"hold_seconds": 60.0}'}
    line = "warning: pdb.set_trace() in <string>:5 is ignored in a debug run; breakpoint() stops\n"
    assert python(code, **spec) == (0, "stopped\n" + line)
    assert python("print(held(5.0), held(500.0), file=sys.stderr)", **spec) == (0, "60.0 500.0\n")
    assert python("print(held(5.0), file=sys.stderr)") == (0, "5.0\n")
