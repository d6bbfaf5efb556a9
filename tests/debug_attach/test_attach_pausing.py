"""A process of a debug run that runs is stopped where it is; one that would be ended by the signal is left alone."""

import os
import subprocess
import sys
import time

import pytest
from stops import SECONDS, a_run, vime, wait_for

from vime.debug.attach import pausing
from vime.debug.attach.pausing import Target, has_handler, pause, targets
from vime.debug.attach.sessions import look
from vime.debug.stop.records import put_run, stops
from vime.debug.stop.spec import Spec
from vime.errors import OutOfTime, UsageError
from vime.reward.breakpoints import DEBUG_SPEC

LOOP = """
import sys, time
number = 0
print("up", flush=True)
while number >= 0:
    number += 1
    time.sleep(0.01)
print("left with", number, flush=True)
"""
IN_C = """
import ctypes
print("up", flush=True)
while True:
    ctypes.PyDLL(None).usleep(600_000_000)
"""


@pytest.fixture
def start(registry, tmp_path):
    """Starts a script as ``vime debug-attach run`` does; all are ended."""
    running = []

    def run(code, session="d-pause", is_prepared=True, **environment):
        file = tmp_path / f"loop{len(running)}.py"
        file.write_text(code)
        spec = Spec(session, folder=registry.where, wait_seconds=600.0).dumps()
        settings = {k: v for k, v in os.environ.items() if k != "RANK"} | {DEBUG_SPEC: spec} | environment
        runner = ["-m", "vime.debug.stop.runner"] if is_prepared else []
        command = [sys.executable, *runner, str(file)]
        process = subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout.readline() == "up\n", process.stderr.read()
        return process

    yield run
    for process in running:
        process.kill()
        process.wait(SECONDS)
        process.stdout.close()
        process.stderr.close()


def test_a_process_that_runs_stops_is_looked_at_and_goes_on(start, registry):
    process = start(LOOP)
    put_run(registry, a_run("d-pause", child_pid=process.pid))
    done = vime("pause", "driver")
    assert done.returncode == 0, done.stderr
    (stop,) = stops(registry)
    assert f"driver (pid {process.pid}) has stopped at " in done.stderr
    assert f"vime debug-attach connect {stop.key}" in done.stderr
    again = vime("pause", str(process.pid))
    assert again.returncode == 2
    assert f"has stopped already: {stop.key}" in again.stderr
    said = vime("connect", stop.key, "--terminal", stdin="p number > 0\nexec number = -5\nc\n").stdout
    assert "(vime) p number > 0\nTrue\n" in said
    assert process.stdout.readline().startswith("left with -")


def test_a_process_is_known_by_its_rank_or_pid(start, registry):
    """Case D14: one rank of several can be chosen."""
    zero, one = start(LOOP, RANK="0"), start(LOOP, RANK="1")
    put_run(registry, a_run("d-pause"))
    found = {target.pid: target for target in targets(look())}
    assert [found[p.pid].rank for p in (zero, one)] == [0, 1]
    with pytest.raises(UsageError, match="which one"):
        pause(look(), None)
    with pytest.raises(UsageError, match="no such process"):
        pause(look(), "rank=2")
    who = Target("d-pause", 1, "engine core", 0)
    assert [pausing.is_meant(who, text) for text in ("engine-core", "enginecore0", "rank=0", "engine", "trainer0")] == [
        True, True, True, False, False,
    ]  # fmt: skip
    assert pause(look(), "rank=1").pid == one.pid
    assert pause(look(), str(zero.pid)).pid == zero.pid


def test_a_process_without_a_handler_is_not_ended(start, registry):
    """SIGUSR2 ends a process that does not take it."""
    process = start(LOOP, is_prepared=False)
    put_run(registry, a_run("d-pause"))
    assert not has_handler(process.pid)
    assert not pausing.signal_here(process.pid)
    with pytest.raises(UsageError, match="no process of a debug run can be paused"):
        pause(look(), str(process.pid))
    time.sleep(0.2)
    assert process.poll() is None


def test_a_process_inside_c_code_is_said(start, registry):
    process = start(IN_C)
    put_run(registry, a_run("d-pause", child_pid=process.pid))
    with pytest.raises(OutOfTime, match="inside C code") as error:
        pause(look(), "driver", seconds=0.5)
    assert "vime debug-attach stacks" in error.value.hint
    assert process.poll() is None


def test_nothing_to_pause(registry):
    done = vime("pause", "driver")
    assert done.returncode == 2
    assert "no process of a debug run can be paused" in done.stderr


def test_a_run_whose_command_was_killed_is_still_paused(start, registry):
    process = start(LOOP)
    put_run(registry, a_run("d-pause", pid=2**22 - 1, started=5, child_pid=process.pid))
    wait_for(lambda: look().sessions, "the debug run")
    assert pause(look(), None).pid == process.pid


def test_names_in_messages():
    assert Target("d", 5, "trainer", 1).name == "trainer 1 (pid 5)"
    assert Target("d", 5).name == "pid 5"
    assert Target("d", 5, "driver").name == "driver (pid 5)"
    assert Target("d", 5, "", 0).name == "rank 0 (pid 5)"
