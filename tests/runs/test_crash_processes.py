"""Attempts in processes of their own: whatever becomes of one, its outcome is told and nothing of it is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vime.debug.crash.trial import Ending, Outcome, Phase
from vime.runs import crash_processes
from vime.runs.crash_processes import Limits, Processes, end_session, ending, session_members


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """attempt(kind, limit, environment) -> how it ended; each in a fresh process."""
    monkeypatch.setattr(crash_processes, "MODULE", "crash_stand_in")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))

    def run(kind: str, limit_seconds: float = 60, **environment: str) -> Ending:
        order = tmp_path / "order.json"
        order.write_text(json.dumps({"kind": kind, "folder": str(tmp_path)}))
        limits = Limits(60.0, limit_seconds)
        ended = Processes(limits, tmp_path).run(order, {"MARK": "seen", **environment})
        return ending(tmp_path, ended, limits)

    return run


def test_one_that_survives(attempt):
    found = attempt("survived")
    assert (found.outcome, found.phase, found.cause) == (Outcome.SURVIVED, Phase.DONE, "")


def test_a_crash_after_the_last_answer_is_said(attempt):
    found = attempt("late")
    assert (found.outcome, found.cause) == (Outcome.SURVIVED, "all answered, but it ended with exit code -11")


def test_the_environment_reaches_it_and_what_it_read_back_is_kept(attempt):
    assert attempt("segfault", MARK="other").facts == {"env MARK": "other"}


def test_a_segfault_of_the_whole_process_is_survived_and_has_its_stack(attempt):
    found = attempt("segfault")
    assert (found.outcome, found.phase) == (Outcome.CRASHED, Phase.SERVING)
    assert found.cause == "SIGSEGV in the process that asks the engine"
    assert any(frame.startswith("main (") and "crash_stand_in.py" in frame for frame in found.stack)


def test_a_segfault_of_the_engine_core_alone(attempt):
    assert attempt("core").cause == "SIGSEGV in the engine core"


def test_what_the_kernel_kills_for_its_memory_is_no_fault_of_the_engine(attempt):
    killed = attempt("out of memory")
    assert killed.cause == "SIGKILL in the engine core (from outside: by the kernel, out of memory, or by hand)"
    assert not killed.is_like(attempt("core"))


def test_an_exception_is_named_with_its_place(attempt):
    found = attempt("exception")
    assert found.cause == "CudaError: boom"
    assert found.stack == ("step (a.py:3)",)


def test_an_end_without_a_word(attempt):
    found = attempt("nothing")
    assert found.outcome == Outcome.CRASHED
    assert found.cause == "exit code 7, and nothing said why"


def test_a_hang_is_ended_with_all_below_it_and_its_stacks_are_kept(attempt, tmp_path):
    found = attempt("hang", 6.0)
    assert (found.outcome, found.phase) == (Outcome.HUNG, Phase.SERVING)
    assert found.cause.startswith("no end within 6 s in ")
    assert "crash_stand_in.py" in (tmp_path / "stacks.txt").read_text()
    child = int((tmp_path / "child.pid").read_text())
    assert not os.path.exists(f"/proc/{child}") or Path(f"/proc/{child}/stat").read_text().rpartition(")")[2][1] in "ZX"


def test_a_session_is_everything_below_its_leader():
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"
    leader = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with leader:
        child = int(leader.stdout.readline())
        assert sorted(session_members(leader.pid)) == sorted([leader.pid, child])
        end_session(leader.pid)
    assert session_members(leader.pid) == []


def test_no_process_is_of_session_0():
    """Which /proc shows for processes whose leader is outside the container."""
    assert session_members(0) == []
