"""Stacks of real processes: by py-spy and by asking them, of a rank that others wait for in a real collective."""

import os
import signal
import subprocess
import sys
import time

import pytest

from vime.debug import stacks
from vime.debug.everywhere import look
from vime.debug.processes import FILE, Member, Roster, family
from vime.debug.stacks import Frame, as_dict, dump, from_dict, in_full, own_threads, parse_faulthandler
from vime.log import STACKS_FILE

PREPARED = "from vime.log import answer_stack_requests; answer_stack_requests()\n"
SLEEPER = """
import os, threading, time
def forgotten():
    time.sleep(120)
threading.Thread(target=forgotten, name="second", daemon=True).start()
print(flush=True)
forgotten()
"""
RANK = """
import sys, time
rank, file = int(sys.argv[1]), sys.argv[2]
import torch
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=3)
def forgotten():
    print(flush=True)
    time.sleep(120)
def step():
    if rank == 1:
        forgotten()
    print(flush=True)
    dist.all_reduce(torch.ones(2))
step()
"""


@pytest.fixture
def start(tmp_path):
    """Starts a script in processes of its own; all are ended."""
    running = []

    def run(code, *arguments):
        path = tmp_path / str(len(running)) / "reward.py"
        path.parent.mkdir()
        path.write_text(code)
        process = subprocess.Popen([sys.executable, str(path), *map(str, arguments)], stdout=subprocess.PIPE)
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.wait(10)
        process.stdout.close()


def without_py_spy(monkeypatch):
    monkeypatch.setattr(stacks, "py_spy_path", lambda: None)


def program(tmp_path, monkeypatch, script):
    """Something else in the place of py-spy."""
    path = tmp_path / "py-spy"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(stacks, "py_spy_path", lambda: str(path))


def started(start, code):
    process = start(code)
    process.stdout.readline()
    time.sleep(0.1)  # from the line to the sleep
    return Member.here("trainer", 0, process.pid)


def functions(found):
    return [[frame.name for frame in thread.frames if frame.file.endswith("reward.py")] for thread in found.threads]


def test_py_spy_reads_every_thread_the_main_one_first(start):
    found = dump(started(start, SLEEPER))
    assert (found.source, found.problem) == ("py-spy", "")
    assert [thread.name.partition(" ")[0] for thread in found.threads] == ["MainThread", "second"]
    assert functions(found) == [["forgotten", "<module>"], ["forgotten"]]
    assert from_dict(as_dict(found)) == found
    assert "forgotten" in in_full([found])


def test_a_prepared_process_and_its_forks_write_their_stacks_themselves(start, monkeypatch):
    without_py_spy(monkeypatch)
    member = started(
        start, PREPARED + "import os\nif os.fork() == 0:\n    import time\n    time.sleep(120)\n" + SLEEPER
    )
    for _ in range(2):  # as often as one likes
        mine, forked = (dump(m) for m in family([member]))
        assert (mine.source, mine.problem) == ("faulthandler", "")
        assert functions(mine) == [["forgotten", "<module>"], ["forgotten"]]
        assert functions(forked) == [["<module>"]]
    os.kill(forked.who.pid, signal.SIGKILL)
    assert member.is_alive


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo 'Error: Permission Denied' >&2; exit 1", "py-spy: Error: Permission Denied"),
        ("sleep 60", "no answer within"),
    ],
)
def test_where_py_spy_may_not_or_does_not_answer_the_process_is_asked(start, tmp_path, monkeypatch, script, problem):
    program(tmp_path, monkeypatch, script)
    monkeypatch.setattr(stacks, "LIMIT_SECONDS", 0.5)
    found = dump(started(start, PREPARED + SLEEPER))
    assert found.source == "faulthandler"
    other = started(start, SLEEPER)
    found = dump(other)
    assert problem in found.problem
    assert found.problem.endswith("; it is not prepared to write its stacks itself")
    assert other.is_alive  # the signal would have ended it


def test_a_process_that_does_not_answer_is_listed_as_such(start, monkeypatch):
    without_py_spy(monkeypatch)
    monkeypatch.setattr(stacks, "ANSWER_SECONDS", 0.3)
    deaf = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [41])\n"
    member = started(start, PREPARED + deaf + SLEEPER)
    assert dump(member).problem == "py-spy is not installed; it did not write its stacks within 0.3 s"
    os.kill(member.pid, signal.SIGSTOP)
    os.waitpid(member.pid, os.WUNTRACED)
    assert dump(member).problem == "is stopped, by SIGSTOP or by a debugger"


def test_a_process_that_has_ended_is_listed_as_such():
    gone = Member("trainer", 2, 1, Member.here("driver").host, 12345, "b")
    assert dump(gone).problem == "has ended"
    away = Member("trainer", 2, 1, "elsewhere", 1, "b", "node")
    (found,) = look([away], {}).dumps
    assert found.problem == "not reached: it runs on elsewhere"


def test_a_taken_signal_is_left_alone(start, monkeypatch):
    without_py_spy(monkeypatch)
    member = started(start, "import signal; signal.signal(41, lambda *_: None)\n" + PREPARED + SLEEPER)
    assert dump(member).problem.endswith("it is not prepared to write its stacks itself")


@pytest.mark.parametrize("source", ["py-spy", "faulthandler"])
def test_a_rank_that_is_missing_in_a_real_collective_is_named(start, tmp_path, monkeypatch, source):
    """Gloo, three ranks: two in all_reduce, one that forgot to come; found by the command a user gives."""
    code = (PREPARED if source == "faulthandler" else "") + RANK
    ranks = [start(code, rank, tmp_path / "met") for rank in range(3)]
    for process in ranks:
        process.stdout.readline()
    time.sleep(0.5)  # from the line into the collective
    Roster(tmp_path / FILE).add([Member.here("trainer", rank, process.pid) for rank, process in enumerate(ranks)])
    if source == "faulthandler":
        without_py_spy(monkeypatch)
        (gone,) = {found.source for found in look([Member.here("trainer", 0, ranks[0].pid)], {}).dumps}
        assert gone == "faulthandler"
        said = look([Member.here("trainer", rank, process.pid) for rank, process in enumerate(ranks)], {}).culprit
    else:
        Roster(tmp_path / FILE).add(
            [
                Member.here("driver"),
                *(Member.here("trainer", rank, process.pid) for rank, process in enumerate(ranks)),
            ]
        )
        command = [sys.executable, "-m", "vime_cli", "debug-attach", "stacks", str(tmp_path)]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()[0]
    assert "trainer rank 1 is in reward.py:" in said
    assert said.endswith(" forgotten; ranks 0, 2 wait for it in all_reduce")


def test_the_asking_process_sees_its_own_threads():
    found = own_threads()
    assert all(thread.frames for thread in found)
    me = dump(Member.here("driver"))
    assert (me.source, me.threads[0].name) == ("itself", "MainThread")


def test_a_faulthandler_dump_is_read():
    text = (
        'Thread 0x1 (most recent call first):\n  File "/a b.py", line 3 in f\n\n'
        'Current thread 0x2 (most recent call first):\n  File "/c.py", line 4 in <module>\n  File "/d.py", line 5 in g'
    )
    first, main = parse_faulthandler(text)
    assert (first.name, first.frames) == ("thread 1", (Frame("f", "/a b.py", 3),))
    assert (main.name, [frame.line for frame in main.frames]) == ("MainThread", [4, 5])
    assert parse_faulthandler("") == []


def test_preparing_twice_takes_one_file(start):
    member = started(start, PREPARED + PREPARED + SLEEPER)
    files = [os.readlink(f"/proc/{member.pid}/fd/{number}") for number in os.listdir(f"/proc/{member.pid}/fd")]
    assert len([file for file in files if STACKS_FILE in file]) == 1
