"""Which debug runs there are, which of their stops live, and what a name means."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from stops import a_run, a_stop, program, stop_of, stopped, vime, wait_for

from vime.debug.attach import listing, sessions
from vime.debug.attach.sessions import Seen, Session, find, look, members_of
from vime.debug.stop.records import ATTACHED, WAITING, put_run, put_stop, runs, stops
from vime.debug.stop.spec import Spec
from vime.errors import UsageError, VimeError
from vime.reward.breakpoints import DEBUG_SPEC

STOPS = [
    a_stop("driver-0001", role="driver", rank=None),
    a_stop("trainer1-9c2e"),
    a_stop("trainer1-9cff"),
    a_stop("trainer12-77aa", rank=12),
    a_stop("engine12-77ab", role="engine", rank=12),
    a_stop("enginecore0-5879", role="engine core", rank=0),
]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("trainer1-9c2e", "trainer1-9c2e"),
        ("d", "driver-0001"),
        ("driver", "driver-0001"),
        ("trainer12", "trainer12-77aa"),
        ("engine", "engine12-77ab"),
        ("engine-core", "enginecore0-5879"),
    ],
)
def test_a_key_its_beginning_or_who_it_is(text, key):
    assert find(STOPS, text).key == key


@pytest.mark.parametrize(
    ("text", "named"),
    [("rank=12", ["trainer12-77aa", "engine12-77ab"]), ("trainer1-9c", ["trainer1-9c2e", "trainer1-9cff"])],
)
def test_several_are_listed_and_none_is_taken(text, named):
    """Case D14: stopped workers are known by role and rank."""
    with pytest.raises(UsageError) as error:
        find(STOPS, text)
    assert [line.split()[0] for line in error.value.message.splitlines()[1:]] == named


def test_an_exact_key_is_not_the_beginning_of_another():
    assert find([a_stop("a-1"), a_stop("a-12")], "a-1").key == "a-1"


@pytest.mark.parametrize("text", ["rank=", "rank=-1", "rank=x", "nobody", "rank=5"])
def test_what_means_nothing_is_refused(text):
    with pytest.raises(UsageError):
        find(STOPS, text)
    with pytest.raises(UsageError, match=r"nothing is stopped|whole number"):
        find([], text)


def test_a_stop_of_a_dead_process_is_pruned_and_its_run_forgotten(registry):
    """Also where the pid is another process's by now, and after the machine has started anew."""
    put_run(registry, a_run("d-dead", pid=2**22 - 1, started=5))
    dead = (("gone", {"pid": 2**22 - 1}), ("reused", {"started": 1}), ("rebooted", {"boot": "other"}))
    for key, about in dead:
        put_stop(registry, a_stop(key, session="d-dead", **about))
    put_stop(registry, a_stop("lives", session="d-2"))
    seen = look()
    assert [stop.key for stop in seen.stops] == ["lives"]
    assert [one.name for one in seen.sessions] == ["d-2"]
    assert seen.sessions[0].run is None
    assert registry.names() == ["d-2/stop/lives"]


def test_a_run_lives_with_its_command_or_with_any_process_of_it(registry, tmp_path):
    """kill -9 of the command alone does not hide what it has started."""
    put_run(registry, a_run("d-mine"))
    put_run(registry, a_run("d-orphan", pid=2**22 - 1, started=5))
    put_run(registry, a_run("d-dead", pid=2**22 - 1, started=5))
    environment = {**os.environ, DEBUG_SPEC: Spec("d-orphan", folder=registry.where).dumps()}
    code = "import time; print(flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, env=environment)
    try:
        child.stdout.readline()
        assert members_of("d-orphan", registry.where) == [child.pid]
        assert sorted(one.name for one in look().sessions) == ["d-mine", "d-orphan"]
        assert sorted(run.session for run in runs(registry)) == ["d-mine", "d-orphan"]
    finally:
        child.kill()
        child.communicate()
    assert [one.name for one in look().sessions] == ["d-mine"]


def test_kill_9_at_a_stop_leaves_the_list_clean_and_the_file_as_it_was(registry, tmp_path):
    file = program(tmp_path)
    before = (file.read_bytes(), file.stat().st_mtime_ns)
    with stopped(file, {"registry": registry.where, "key": "trainer1-9c2e", "rank": 1}) as process:
        put_run(registry, a_run("d-1", pid=process.pid))
        stop_of(process, registry)
        listed = vime("list")
        assert listed.returncode == 0
        assert "trainer1-9c2e" in listed.stdout
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        assert len(stops(registry)) == 1
        after = vime("list")
    assert (after.returncode, after.stdout) == (0, "nothing is stopped\n")
    assert registry.names() == []
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before


def test_resume_lets_those_go_on_that_wait(registry, tmp_path):
    with stopped(program(tmp_path), {"registry": registry.where, "key": "trainer1-9c2e", "rank": 1}) as process:
        put_run(registry, a_run("d-1"))
        stop_of(process, registry)
        done = vime("resume", "rank=1")
        assert (done.returncode, done.stderr) == (0, "trainer 1 (trainer1-9c2e) goes on\n")
        assert process.communicate(timeout=60)[0] == "result 10\n"
    assert vime("resume", "--all").stderr == "nothing is stopped\n"
    assert vime("resume").returncode == vime("resume", "rank=1", "--all").returncode == 2


def test_resume_tells_of_those_that_a_client_holds(registry):
    put_stop(registry, a_stop("free", state=WAITING))
    put_stop(registry, a_stop("held", state=ATTACHED))
    done = vime("resume", "--all")
    assert done.returncode == 2
    assert "trainer 1 (free) goes on" in done.stderr
    assert "held" in done.stderr
    assert "its client must let it go on" in done.stderr
    assert registry.names("d-1/release/") == ["d-1/release/free"]


def test_resume_all_means_one_debug_run(registry):
    """Those of another are somebody's who may be looking at them."""
    put_stop(registry, a_stop("mine", session="d-1"))
    put_stop(registry, a_stop("yours", session="d-2"))
    done = vime("resume", "--all")
    assert done.returncode == 2
    assert "error: --all: 2 debug runs have stops, which one?" in done.stderr
    assert {"d-1", "d-2", "mine", "yours"} <= {word for line in done.stderr.splitlines() for word in line.split()}
    assert vime("resume", "d-1").stderr == "trainer 1 (mine) goes on\n"
    assert [name for name in registry.names() if "/release/" in name] == ["d-1/release/mine"]


def test_who_waits_is_said_of_each_debug_run(registry):
    put_stop(registry, a_stop("mine", session="d-1"))
    assert not any(line.startswith("d-1") for line in listing.lines(look()))
    put_stop(registry, a_stop("yours", session="d-2"))
    assert [line.split(": ")[0] for line in listing.lines(look())] == ["d-1", "d-2"]


def test_where_clusters_are_many_a_stop_of_this_machine_is_found_all_the_same(registry, monkeypatch):
    """Case D12: none is guessed; what means one stop here needs none. What does not is refused, with the clusters."""

    def refuse(address):
        raise UsageError("2 Ray clusters on this machine, which one?\n  a\n  b")

    monkeypatch.setattr(sessions.clusters, "chosen", refuse)
    put_stop(registry, a_stop("trainer1-9c2e"))
    put_stop(registry, a_stop("trainer2-9c2e", rank=2))
    seen = look(key="rank=1")
    assert find(seen.stops, "rank=1").key == "trainer1-9c2e"
    assert seen.notes == (
        "2 Ray clusters on this machine, which one? None was asked: rank=1 is a stop of this machine",
    )
    for key in ("rank=3", "trainer", None):
        with pytest.raises(UsageError, match="which one"):
            look(key=key)
    with pytest.raises(UsageError, match="which one"):
        look("127.0.0.1:1", "rank=1")


def test_the_session_of_a_stop_is_the_one_that_holds_it(registry):
    stop = a_stop("a")
    put_stop(registry, stop)
    other = Session("d-1", registry, None, ())
    assert Seen((other, Session("d-1", registry, None, (stop,)))).session_of(stop).stops == (stop,)
    assert wait_for(lambda: sessions.look_here(), "a session")[0].stops == (stop,)


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "cannot be read"), ("{", "cannot be read"), ("[]", "cannot read the entry d-9/run"), ('{"x": 1}', "d-9/run")],
)
def test_an_entry_that_cannot_be_read_is_named(registry, text, said):
    put_run(registry, a_run("d-9"))
    (registry.folder / "d-9" / "run.json").write_text(text)
    with pytest.raises(VimeError, match=said) as raised:
        look("local")
    assert str(registry.folder) in raised.value.message
    assert "remove" in raised.value.hint


def test_a_stop_is_told_with_the_file_here_and_the_command_that_attaches(registry):
    """Ray runs a copy of the code, in a folder with a long name."""
    copied = a_stop(file="/tmp/ray/copy/pkg/work.py", local_root="/home/me/work", remote_root="/tmp/ray/copy")
    where, _, attach = listing.announcement(copied, registry)
    assert "has stopped at /home/me/work/pkg/work.py:5 compute: breakpoint step == 2" in where
    assert f"vime debug-attach connect {copied.key}, or a client of your own to 127.0.0.1:5678" in attach
    assert listing.place(replace(copied, file="/tmp/ray/copy2/work.py")) == "/tmp/ray/copy2/work.py:5 compute"
