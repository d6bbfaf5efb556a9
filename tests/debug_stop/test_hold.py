"""Time for those who wait: raised in a debug run, once and said; nowhere else. Nothing ends while somebody looks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from vime.backends.megatron.rank import collective_limit
from vime.config.load import read, to_toml
from vime.debug.processes import Member
from vime.debug.stop import hold, linger
from vime.debug.stop.records import Stop, forget_stop, put_stop
from vime.debug.stop.registry import FolderRegistry
from vime.debug.stop.spec import Point, Spec
from vime.reward.breakpoints import DEBUG_SPEC, held
from vime.run_folder import RunFolder
from vime.runs.watched import limits_of

SETTINGS = ["model.path=/model", 'data.prompts=["/prompts.jsonl"]', "reward.timeout_seconds=7"]


@pytest.fixture
def spec(monkeypatch, tmp_path) -> Spec:
    found = Spec("d-1", hold_seconds=9000.0, folder=str(tmp_path / "registry"))
    monkeypatch.setenv(DEBUG_SPEC, found.dumps())
    return found


@pytest.fixture(autouse=True)
def _no_debug_run(monkeypatch):
    monkeypatch.delenv(DEBUG_SPEC, raising=False)


def test_outside_of_a_debug_run_nothing_is_raised():
    loaded = read([], SETTINGS)
    assert hold.raised_run(loaded) == (loaded, "")
    assert held(20.0) == 20.0
    assert hold.raised(loaded.config) == (loaded.config, [])


def test_every_wait_of_a_debug_run_is_as_long_as_a_stop_may_be(spec):
    loaded, text = hold.raised_run(read([], [*SETTINGS, "rollout.timeout_seconds=100000"]))
    assert set(hold.limits(loaded.config).values()) == {9000.0, 100000.0}
    assert text == (
        "debug run: the others wait up to 9000 s for a process that has stopped; raised from "
        "train.step_timeout_seconds 1800, weights.timeout_seconds 300, cluster.start_timeout_seconds 300, "
        "reward.timeout_seconds 7"
    )
    assert collective_limit(loaded.config.train.step_timeout_seconds) > 9000.0
    overdue = limits_of(loaded.config)["generate"].overdue
    assert min(limit.seconds for limit in limits_of(loaded.config).values()) >= 9000.0
    assert overdue is not None
    assert overdue > 100000.0
    assert held(20.0) == 9000.0


def test_every_setting_of_a_wait_is_known():
    from vime.config.names import settings

    assert {path for path in settings() if path.endswith("timeout_seconds")} == set(hold.SETTINGS)


def test_config_toml_says_what_was_asked_for(spec, tmp_path):
    loaded, _ = hold.raised_run(read([], SETTINGS))
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.begin(loaded, resume=False)
    assert folder.config.read_text() == to_toml(read([], SETTINGS).config)
    assert "timeout_seconds = 7.0" in folder.config.read_text()
    again, _ = hold.raised_run(loaded)
    assert again.asked == read([], SETTINGS).config, "raised twice it still is what was asked for"


def stop_of(pid: int, key: str) -> Stop:
    who = Member.here("trainer", 1, pid)
    where = {"file": "a.py", "line": 1, "function": "f", "code": "x", "thread": "MainThread"}
    more = {"host": "127.0.0.1", "port": 1, "since": time.time(), "until": time.time() + 60, "address": "127.0.0.1"}
    return Stop(
        key, "d-1", "p0", "breakpoint", role="trainer", rank=1, pid=pid, hostname=who.host, started=who.started,
        boot=who.boot, **where, **more,
    )  # fmt: skip


def test_a_run_that_fails_does_not_end_while_somebody_looks_at_one_of_its_processes(spec):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    registry = FolderRegistry(Path(spec.folder))
    stop = stop_of(process.pid, "trainer1-ab")
    put_stop(registry, stop)
    put_stop(registry, stop_of(os.getpid(), "driver-ab"))  # this process does not wait for itself
    said: list[str] = []
    has_said = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        has_said.set()

    def fail() -> None:
        with pytest.raises(ValueError, match="lost"), hold.while_stopped(say):
            raise ValueError("lost\nand more")

    thread = threading.Thread(target=fail)
    thread.start()
    try:
        assert has_said.wait(60)
        assert said == ["the run ends with ValueError: lost, but not before these go on: trainer 1 (trainer1-ab)"]
        assert thread.is_alive()
        forget_stop(registry, stop)
        thread.join(60)
        assert not thread.is_alive()
    finally:
        process.kill()
        process.wait(60)
    put_stop(registry, stop)  # of a process that is gone
    with hold.while_stopped(say):
        pass
    assert len(said) == 1


def test_an_interrupt_is_not_held_up(spec):
    put_stop(FolderRegistry(Path(spec.folder)), stop_of(os.getppid(), "trainer1-ab"))
    assert hold.others(spec)
    with pytest.raises(KeyboardInterrupt), hold.while_stopped(pytest.fail):
        raise KeyboardInterrupt


def test_the_driver_says_what_its_run_is(spec, tmp_path):
    hold.note_run(read([], [*SETTINGS, "parallel.dp=2"]).config, tmp_path)
    found = FolderRegistry(Path(spec.folder)).get(f"d-1/{hold.NOTE}")
    assert (found["trainers"], found["engines"], found["run_dir"]) == (2, 1, str(tmp_path))
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("is_ending", [True, False])
def test_a_main_program_stays_for_a_stop_but_not_in_a_run_that_is_being_ended(tmp_path, monkeypatch, capsys, is_ending):
    registry = FolderRegistry(tmp_path / "registry")
    point = Point("p0", "work.py:1")
    found = Spec("d-1", (point,), folder=str(registry.folder), wait_seconds=1.0)
    monkeypatch.setattr(linger, "spec_here", lambda: found)
    me = Member.here("trainer", 1)
    where = {"file": "w.py", "line": 1, "function": "f", "code": "x", "address": "127.0.0.1", "thread": "a thread"}
    who = {"role": "trainer", "rank": 1, "pid": me.pid, "hostname": me.host, "started": me.started, "boot": me.boot}
    more = {"host": "127.0.0.1", "port": 1, "since": 0.0, "until": 9e9}
    put_stop(registry, Stop("t-1", "d-1", "p0", "breakpoint", **where, **who, **more))
    if is_ending:
        registry.put(f"d-1/{linger.ENDING}", {})
    linger.linger()
    assert ("it stays until t-1" in capsys.readouterr().err) == (not is_ending)
