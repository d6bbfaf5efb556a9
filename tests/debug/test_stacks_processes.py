"""Who is who in a run: the file, stale pids, children, runs that are alive."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from vime.debug import processes
from vime.debug.processes import FILE, Member, Roster, family, find_run, is_live, live_runs, read_roster
from vime.errors import UsageError
from vime.run_folder import RunFolder

SLEEP = [sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"]


@pytest.fixture
def child():
    """A process that sleeps."""
    process = subprocess.Popen(SLEEP, stdout=subprocess.PIPE)
    process.stdout.readline()
    yield process
    process.kill()
    process.wait(10)
    process.stdout.close()


def test_what_is_written_is_read_back_and_a_successor_takes_the_place(tmp_path):
    roster = Roster(tmp_path / FILE)
    roster.add([Member.here("driver"), Member("trainer", 1, 5, "other", 7, "b", "node")])
    roster.add([Member("trainer", 1, 6, "other", 8, "b", "node")])
    roster.write(command="train")
    found = read_roster(tmp_path)
    assert [(m.name, m.pid) for m in found.members] == [("driver", os.getpid()), ("trainer rank 1", 6)]
    assert found.facts == {"command": "train"}
    assert is_live(found)
    roster.drop("trainer")
    assert [m.name for m in read_roster(tmp_path).members] == ["driver"]
    assert os.listdir(tmp_path) == [FILE]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "other", "schema_version": 1}', '{"format": 1}'])
def test_another_file_is_refused(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(UsageError, match="no list of processes"):
        read_roster(tmp_path)


def test_a_newer_schema_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(UsageError, match="no run was started in it"):
        read_roster(tmp_path)
    Roster(tmp_path / FILE).write()
    content = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps(content | {"schema_version": 2}))
    with pytest.raises(UsageError, match="no list of processes"):
        read_roster(tmp_path)


def test_a_pid_that_another_process_has_by_now_is_not_taken_for_the_old_one(child):
    member = Member.here("trainer", 1, child.pid)
    assert member.is_alive
    assert not replace(member, started=member.started - 1).is_alive  # a process that had the pid before
    assert not replace(member, boot="before the restart").is_alive
    child.kill()
    child.wait(10)
    assert not member.is_alive


def test_children_are_found_and_called_after_whom_they_belong_to(child):
    code = f"import subprocess; subprocess.Popen({SLEEP!r}).wait()"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    parent.stdout.readline()
    engine = Member.here("engine", 3, parent.pid)
    found = family([engine])
    assert [m.name for m in found] == ["engine 3", "engine 3 core"]
    assert found[1].role == "engine core"
    for member in found:
        os.kill(member.pid, 9)
    parent.wait(10)
    parent.stdout.close()
    driver = Member.here("driver")
    assert family([driver]) == [driver]  # this process has a child, which is no reward worker


def test_a_run_is_alive_while_its_driver_holds_the_lock(tmp_path):
    with RunFolder(tmp_path).held():
        assert tmp_path not in live_runs()
        Roster(tmp_path / FILE).add([Member.here("driver")])
        assert tmp_path in live_runs()
    assert tmp_path not in live_runs()


def test_without_a_folder_there_must_be_one_run(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "live_runs", list)
    with pytest.raises(UsageError, match="no run of yours is alive"):
        find_run(None)
    monkeypatch.setattr(processes, "live_runs", lambda: [tmp_path])
    assert find_run(None) == tmp_path
    monkeypatch.setattr(processes, "live_runs", lambda: [tmp_path / "a", tmp_path / "b"])
    with pytest.raises(UsageError) as error:
        find_run(None)
    assert f"{tmp_path / 'a'}" in error.value.message
    assert f"{tmp_path / 'b'}" in error.value.message
    assert find_run("x").name == "x"
