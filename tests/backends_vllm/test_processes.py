"""Forked processes end with their parent, also where it ends before they can say so."""

from __future__ import annotations

import os
import time

from vime.backends.vllm import processes
from vime.backends.vllm.processes import forking_dies_with_parent


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
        processes._state["parent"] = 1 << 30  # no process: as if it had ended just after the fork
        assert exit_code_of_fork(lambda: 7) == 1
