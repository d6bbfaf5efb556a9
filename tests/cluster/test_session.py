"""A private Ray cluster: on loopback, explained failures, first causes, nothing left behind."""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from vime.cluster.last_words import read_fatal
from vime.cluster.leftovers import remove_leftovers
from vime.cluster.placement import place
from vime.cluster.session import Process, RaySession, end_processes
from vime.cluster.waiting import gather
from vime.config.schema import Config
from vime.debug.processes import command_line, pids
from vime.errors import UsageError, VimeError


def config(**sections):
    return Config(model={"path": "m"}, data={"prompts": ["p"]}, **sections)


class Worker:
    def pid(self):
        return os.getpid()

    def fail(self, kind):
        if kind == "vime":
            raise VimeError("weights hold a NaN", "look at the last step")
        if kind == "peer":
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
        if kind == "crash":
            ctypes.string_at(0)
        if kind == "exit":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("odd number of heads")

    def sleep(self, seconds):
        time.sleep(seconds)

    def temp_dir(self):
        return tempfile.gettempdir()


@pytest.fixture(scope="module")
def session():
    session = RaySession.start(config())
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test file
    yield session
    session.close()
    assert session.temp_dir is not None
    assert not session.temp_dir.exists()


def test_temporary_files_of_workers_go_with_the_session(session):
    (a,) = workers(session, 1)
    (folder,) = gather({"w": a.temp_dir.remote()}, 30, "ask").values()
    assert folder == str(session.temp_dir)
    assert os.environ.get("TMPDIR") != folder


def workers(session, n):
    actors = [session.start_actor(Worker, f"w{i}", {"num_cpus": 0.1}) for i in range(n)]
    gather({f"w{i}": a.pid.remote() for i, a in enumerate(actors)}, 60, "start")
    return actors


def test_the_cluster_is_private_and_on_loopback(session):
    assert session.is_private
    assert session.address.startswith("127.0.0.1:")
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_a_signal_to_the_group_of_the_driver_reaches_no_process_of_the_cluster(session):
    daemons = [pid for pid in pids() if str(session.temp_dir) in command_line(pid)]
    assert any("raylet" in command_line(pid) for pid in daemons)
    assert os.getpgrp() not in map(os.getpgid, daemons)


def test_a_peer_loss_never_hides_the_first_cause(session):
    a, b = workers(session, 2)
    with pytest.raises(VimeError, match=r"step: rank 1 failed: ValueError: odd number of heads") as error:
        gather({"rank 0": a.fail.remote("peer"), "rank 1": b.fail.remote("other")}, 30, "step")
    assert "test_session.py" in error.value.hint


def test_our_own_error_comes_back_as_it_was_raised(session):
    (a,) = workers(session, 1)
    with pytest.raises(VimeError, match=r"^weights hold a NaN$") as error:
        gather({"rank 0": a.fail.remote("vime")}, 30, "step")
    assert error.value.hint == "look at the last step"


def test_a_death_is_named(session):
    a, b = workers(session, 2)
    with pytest.raises(VimeError, match="step: rank 1 died"):
        gather({"rank 0": a.fail.remote("peer"), "rank 1": b.fail.remote("exit")}, 30, "step")


def test_a_crash_in_native_code_is_named_with_its_place(session):
    """Case T27: that an actor died is never all that is said."""
    a, b = workers(session, 2)
    with pytest.raises(VimeError) as error:
        gather({"rank 0": a.fail.remote("peer"), "rank 1": b.fail.remote("crash")}, 30, "step")
    line = Worker.fail.__code__.co_firstlineno + 6
    assert error.value.message == f"step: rank 1 died: Segmentation fault at string_at <- test_session.py:{line} fail"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("all is well\n", ""),
        ("Fatal Python error: Aborted\n", "Aborted"),
        (
            "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  no memory\n",
            "terminate called after throwing an instance of 'std::bad_alloc' what(): no memory",
        ),
        (
            'Fatal Python error: Bus error\n\nThread 0x1 (most recent call first):\n  File "/home/a.py", line 7 in f\n',
            "Bus error at a.py:7 f",
        ),
    ],
)
def test_last_words(text, words):
    assert read_fatal(text) == words


def test_a_missing_answer_is_named_within_the_limit(session):
    a, b = workers(session, 2)
    with pytest.raises(VimeError, match=r"step: no answer from rank 1 within 1 s"):
        gather({"rank 0": a.pid.remote(), "rank 1": b.sleep.remote(60)}, 1, "step")


def test_processes_that_do_not_end_are_killed():
    process = subprocess.Popen([sys.executable, "-c", "import signal,time; signal.signal(15, 1); time.sleep(600)"])
    end_processes([Process.of(process.pid)], 10)
    assert process.wait(5) == -signal.SIGKILL


def test_another_process_with_the_pid_of_an_ended_one_is_left_alone():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        end_processes([Process(process.pid, Process.of(process.pid).started - 1)], 3)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait(5)


def test_pids_of_a_joined_cluster_are_not_watched():
    """They may be on another machine; here the same number is somebody else's."""
    session = RaySession("10.0.0.1:6379", is_private=False)
    session.watch([os.getpid()])
    assert session.processes == set()


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(KeyboardInterrupt, KeyboardInterrupt), (Exception("The current node timed out.\nmore"), VimeError)],
)
def test_a_cluster_that_does_not_come_up_leaves_nothing(monkeypatch, tmp_path, raised, expected):
    import ray

    def failing(**_):
        raise raised

    monkeypatch.setattr(ray, "init", failing)
    monkeypatch.setattr(ray, "shutdown", lambda: None)  # the cluster of this module goes on
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(expected) as error:
        RaySession.start(config())
    assert expected is KeyboardInterrupt or str(error.value).endswith("did not come up: The current node timed out.")
    assert list(tmp_path.iterdir()) == []


HELD = """
import sys
from vime.cluster.leftovers import make_temp_dir
from vime.weights.shm import SharedBuffer
folder, lock = make_temp_dir()
buffer = SharedBuffer.create(64, sys.argv[1])
print(folder, buffer.path, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_run_left_is_removed_and_a_living_one_keeps_its_own(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", HELD, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment, **pipes)
    paths = [Path(p) for p in process.stdout.readline().split()]
    (paths[0] / "vime-engine0-x").mkdir()
    for path in paths:
        os.utime(path, (0, 0))  # old enough
    try:
        assert len(paths) == 2
        assert remove_leftovers((str(tmp_path),)) == []
    finally:
        process.kill()
        process.wait(5)
    assert sorted(remove_leftovers((str(tmp_path),))) == sorted(paths)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_starts_just_now_is_left_alone(tmp_path):
    (tmp_path / "vime-run-new").mkdir()
    assert remove_leftovers((str(tmp_path),)) == []


def test_auto_is_refused():
    with pytest.raises(UsageError, match="does not guess"):
        RaySession.start(config(cluster={"ray_address": "auto"}))


def test_more_processes_than_cores_share_them():
    cfg = config(parallel={"tp": 2, "pp": 2}, rollout={"num_engines": 2})
    placement = place(cfg, {"CPU": 2.0})
    assert len(placement.trainer_options) == 4
    assert len(placement.engine_options) == 2
    assert sum(own["num_cpus"] for own in placement.trainer_options + placement.engine_options) <= 2.0
    assert placement.warnings


def test_gpus_are_counted_before_anything_waits():
    cfg = config(parallel={"dp": 2}, rollout={"num_engines": 2, "engine_tp": 2})
    assert [own["num_gpus"] for own in place(cfg, {"GPU": 6.0}).trainer_options] == [1, 1]
    assert [own["num_gpus"] for own in place(cfg, {"GPU": 6.0}).engine_options] == [2, 2]
    with pytest.raises(UsageError, match=r"6 GPUs wanted \(2 trainer ranks, 2 engines x tp 2\), 5 available"):
        place(cfg, {"GPU": 5.0})
    with pytest.raises(UsageError, match="engine_tp = 2: colocated engines hold one GPU each"):
        place(cfg.model_copy(update={"cluster": cfg.cluster.model_copy(update={"colocate": True})}), {"GPU": 4.0})


def test_no_cpu_at_all_is_refused_at_once():
    with pytest.raises(UsageError, match="no CPU available"):
        place(config(), {})


KILLED = """
import os, signal, sys
from vime.cluster.session import RaySession
from vime.config.schema import Config
session = RaySession.start(Config(model={"path": "m"}, data={"prompts": ["p"]}))
class W:
    def pid(self): return os.getpid()
import ray
print(ray.get(session.start_actor(W, "w", {}).pid.remote()), session.temp_dir, flush=True)
signal.pause()
"""


@pytest.mark.slow
def test_kill_9_of_the_driver_leaves_no_process():
    process = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    pid, temp_dir = process.stdout.readline().split()
    process.kill()
    process.wait(5)
    deadline = time.monotonic() + 30
    while (left := using(temp_dir) + using_pid(int(pid))) and time.monotonic() < deadline:
        time.sleep(0.2)
    end_processes([Process.of(p) for p in left], 10)
    assert left == []


def using(text):
    """Processes of this machine whose command line names ``text``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if text.encode() in command:
            found.append(int(entry.name))
    return found


def using_pid(pid):
    try:
        return [] if ") Z" in Path(f"/proc/{pid}/stat").read_text() else [pid]
    except OSError:
        return []
