"""``vime debug-attach list`` and its neighbours: options, help, what is printed."""

import json
import os
import pty
import socket
import subprocess
import sys
import termios
import time
from dataclasses import asdict

import pytest

from vime.debug.attach.listing import blocks, num_columns
from vime.debug.processes import boot_id, start_ticks
from vime.debug.stop.records import Run, Stop, forget_stop, put_run, put_stop
from vime.debug.stop.registry import FolderRegistry
from vime_cli.debug_connect import with_values

COMMAND = [sys.executable, "-m", "vime_cli", "debug-attach"]
SECONDS = 60
ME = {"pid": os.getpid(), "started": start_ticks(os.getpid()), "boot": boot_id(), "hostname": socket.gethostname()}


def a_stop(key, rank, **other):
    about = {
        "key": key, "session": "d-list", "point": "p0", "reason": "breakpoint i == 2", "file": "/w/work.py", "line": 5,
        "function": "compute", "code": "if i == 2:", "role": "trainer", "rank": rank, "address": "10.0.0.7",
        "thread": "MainThread", "host": "127.0.0.1", "port": 5678, "since": time.time(), "until": time.time() + 600,
    }  # fmt: skip
    return Stop(**about | ME | other)


@pytest.fixture
def registry(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.delenv("RAY_DEBUG_POSTMORTEM", raising=False)
    return FolderRegistry(tmp_path / f"vime-debug-{os.getuid()}")


def run(*args):
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=SECONDS, check=False)


def a_run():
    about = {"command": ("python3", "train.py", "--lr", "1"), "working_dir": "/w", "began": time.time()}
    return Run("d-list", hold_seconds=14400.0, wait_seconds=1800.0, **about, **ME)


def test_nothing_is_stopped_and_nothing_is_left_behind(registry, tmp_path):
    registry.folder.rmdir()
    done = run("list")
    assert (done.returncode, done.stdout, done.stderr) == (0, "nothing is stopped\n", "")
    assert not registry.folder.exists()


def test_nothing_is_stopped_of_a_run_that_lives(registry):
    put_run(registry, a_run())
    done = run("list")
    assert done.returncode == 0
    assert "debug run d-list is alive, nothing of it is stopped: python3 train.py --lr 1" in done.stdout


def test_the_table_says_where_why_and_who(registry):
    """Case D03: who waits, where, and how to attach; case D14: role and rank."""
    put_run(registry, a_run())
    put_stop(registry, a_stop("trainer1-9c2e", 1))
    put_stop(registry, a_stop("driver-0001", None, role="driver", reason="ValueError: no", state="attached"))
    done = run("list")
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    for cell in ("/w/work.py:5 compute", "breakpoint i == 2", "trainer 1", str(os.getpid()), "waiting (", "if i == 2:"):
        assert cell in rows["trainer1-9c2e"]
    assert "ValueError: no" in rows["driver-0001"]
    assert "attached" in rows["driver-0001"]


def test_a_narrow_terminal_gets_no_table(registry):
    """A key in two pieces could not be copied."""
    rows = [("trainer1-9c2e", "w.py:5 f", "breakpoint", "trainer 1", "here", "7", "9s", "waiting", "if i:")]
    assert num_columns(rows) > 80
    assert blocks(rows) == [
        "trainer1-9c2e  trainer 1  pid 7  here  since 9s  waiting",
        "    w.py:5 f: breakpoint",
        "        if i:",
    ]
    put_stop(registry, a_stop("trainer1-9c2e", 1))
    parent, child = pty.openpty()
    termios.tcsetwinsize(child, (24, 80))
    environment = os.environ | {"TERM": "xterm", "NO_COLOR": "1"}
    done = subprocess.run([*COMMAND, "list"], stdout=child, timeout=SECONDS, check=True, env=environment)
    written = os.read(parent, 65536).decode()
    os.close(child)
    os.close(parent)
    assert done.returncode == 0
    assert written.startswith("trainer1-9c2e  trainer 1  pid ")


def test_json_has_every_field_of_a_stop(registry):
    put_run(registry, a_run())
    stop = a_stop("trainer1-9c2e", 1)
    put_stop(registry, stop)
    found = json.loads(run("list", "--json").stdout)
    assert list(found) == ["format", "schema_version", "address", "stops", "runs", "ray_paused", "notes"]
    assert found["stops"] == [asdict(stop) | {"who": "trainer 1", "is_here": True}]
    (of_run,) = found["runs"]
    assert (of_run["session"], of_run["num_stops"], of_run["run"]["pid"]) == ("d-list", 1, os.getpid())
    assert of_run["registry"] == registry.where
    assert len(of_run["behind"]) == 1


def test_watch_writes_a_line_for_what_comes_and_what_goes(registry):
    first, second = a_stop("trainer1-9c2e", 1), a_stop("trainer2-77aa", 2)
    put_stop(registry, first)
    process = subprocess.Popen([*COMMAND, "list", "--watch"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().startswith("trainer1-9c2e  /w/work.py:5 compute")
        put_stop(registry, second)
        while not (line := process.stdout.readline()).startswith("trainer2-77aa"):
            assert line
        forget_stop(registry, first)
        while (line := process.stdout.readline()) != "trainer1-9c2e is not stopped any more\n":
            assert line
        process.send_signal(2)
        _, said = process.communicate(timeout=SECONDS)
        assert (process.returncode, said) == (130, "interrupted\n")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (["--forward"], ["--forward", "0"]),
        (["--forward", "5678", "k"], ["--forward", "5678", "k"]),
        (["--forward", "rank=1"], ["--forward", "0", "rank=1"]),
        (["k", "--launch-json"], ["k", "--launch-json", "default"]),
        (["--launch-json", "rank=1"], ["--launch-json", "default", "rank=1"]),
        (["--launch-json", "-"], ["--launch-json", "-"]),
        (["--launch-json", "a/b.json", "k"], ["--launch-json", "a/b.json", "k"]),
    ],
)
def test_values_that_may_be_left_out(args, found):
    assert with_values(args) == found


@pytest.mark.parametrize(
    "args",
    [
        ("list", "--watch", "--json"),
        ("list", "--address", "auto"),
        ("connect", "--forward", "--terminal"),
        ("connect", "nobody"),
        ("resume",),
        ("resume", "nobody"),
        ("pause", "rank=x"),
        ("connect", "--launch-json", "-"),
    ],
)
def test_wrong_usage_is_exit_code_2(registry, args):
    done = run(*args)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_help_needs_no_library(registry):
    code = "import sys; from vime_cli.app import app; sys.argv = ['vime', 'debug-attach', '--help']\n"
    code += "try: app()\nexcept SystemExit: pass\n"
    code += "print(sorted({'ray', 'debugpy', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for name in ("list", "connect", "resume", "pause", "doctor"):
        assert f"\n  {name} " in done.stdout
