"""Forked processes end with their parent, also where it ends before they can say so."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from vime import forks
from vime.forks import forking_dies_with_parent


def exit_code_of_fork(act) -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(act())
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    raise AssertionError("the fork did not end")


def test_a_fork_and_its_own_fork_live_with_their_parents() -> None:
    with forking_dies_with_parent():
        assert exit_code_of_fork(lambda: exit_code_of_fork(lambda: 7)) == 7


def test_a_fork_whose_parent_is_gone_already_ends_at_once() -> None:
    with forking_dies_with_parent():
        forks._state["parent"] = 1 << 30  # no process: as if it had ended just after the fork
        assert exit_code_of_fork(lambda: 7) == 1


PARENT = """
import os, time
from vime.forks import forking_dies_with_parent
with forking_dies_with_parent():
    pid = os.fork()
if pid:
    print(pid, flush=True)
time.sleep(600)
"""


def test_a_fork_ends_when_its_parent_is_killed() -> None:
    """A trainer killed while it saves must not leave the writers of its checkpoint behind."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    assert is_alive(child)
    parent.kill()
    parent.wait(10)
    deadline = time.monotonic() + 20
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)


def is_alive(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
