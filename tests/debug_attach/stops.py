"""Processes that stop as those of a debug run do: a debug adapter on loopback, and a record in a registry."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from vime.debug.processes import boot_id, start_ticks
from vime.debug.stop import records
from vime.debug.stop.records import Run, Stop
from vime.debug.stop.registry import FolderRegistry

SECONDS = 60
PROGRAM = """\
import atexit, dataclasses, json, os, sys, time
import debugpy
from vime.debug.stop.registry import FolderRegistry, GcsRegistry
from vime.debug.stop.records import ATTACHED, Stop, forget_stop, is_released, put_stop
from pathlib import Path

def stop_here(about):
    debugpy.configure(subProcess=False)
    host, port = debugpy.listen(("127.0.0.1", 0))
    import pydevd
    from vime.debug.processes import boot_id, start_ticks
    where = about.pop("registry")
    registry = GcsRegistry(where) if ":" in where else FolderRegistry(Path(where))
    frame = sys._getframe(1)
    now = time.time()
    stop = Stop(**{**dict(session="d-1", point="p0", reason="breakpoint", file=frame.f_code.co_filename,
        line=frame.f_lineno + 1, function=frame.f_code.co_name, code="total = a + b", role="trainer", rank=None,
        pid=os.getpid(), hostname=__import__("socket").gethostname(), address="127.0.0.1",
        started=start_ticks(os.getpid()), boot=boot_id(), thread="MainThread", host=host, port=port, since=now,
        until=now + 600), **about})
    put_stop(registry, stop)
    while not debugpy.is_client_connected():
        if is_released(registry, stop):
            forget_stop(registry, stop)
            return
        time.sleep(0.02)
    put_stop(registry, dataclasses.replace(stop, state=ATTACHED))
    atexit.register(forget_stop, registry, stop)
    pydevd.settrace(stop_at_frame=frame, patch_multiprocessing=False)

def add(a, b):
    stop_here(json.loads(sys.argv[1]))
    total = a + b
    doubled = total * 2
    return doubled

if __name__ == "__main__":
    print("result", add(2, 3), flush=True)
    if "--stay" in sys.argv:
        time.sleep(600)
"""
STOP_LINE = PROGRAM.splitlines().index("    total = a + b") + 1


def program(folder: Path) -> Path:
    """The script whose ``add`` stops at its second line."""
    file = folder / "work.py"
    file.write_text(PROGRAM)
    return file


@contextmanager
def stopped(file: Path, about: dict, *args: str):
    """A process of ``file`` that has stopped. It ends with the block."""
    import json

    process = subprocess.Popen(
        [sys.executable, str(file), json.dumps(about), *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(SECONDS)
        process.stdout.close()  # its debug adapter has them too, and ends later
        process.stderr.close()


def wait_for(condition, what: str):
    """The first true result; fails where none comes in time."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {SECONDS} s")


def stop_of(process: subprocess.Popen, registry: FolderRegistry) -> Stop:
    """Its record, once it is there."""

    def found():
        assert process.poll() is None, process.stderr.read()
        return next((s for s in records.stops(registry) if s.pid == process.pid), None)

    return wait_for(found, "a stop")


def a_run(session: str, pid: int | None = None, **other) -> Run:
    """A debug run whose command is this process, or another one."""
    number = os.getpid() if pid is None else pid
    import socket

    about = {
        "session": session, "command": ("python", "train.py"), "pid": number, "started": start_ticks(number),
        "boot": boot_id(), "hostname": socket.gethostname(), "working_dir": "/w", "began": time.time(),
        "hold_seconds": 14400.0, "wait_seconds": 1800.0,
    }  # fmt: skip
    return Run(**about | other)


def a_stop(key: str = "trainer1-aaaa", **other) -> Stop:
    """A record of a stop of this process."""
    import socket

    about = {
        "key": key, "session": "d-1", "point": "p0", "reason": "breakpoint step == 2", "file": "/w/work.py", "line": 5,
        "function": "compute", "code": "if i == 2:", "role": "trainer", "rank": 1, "pid": os.getpid(),
        "hostname": socket.gethostname(), "address": "127.0.0.1", "started": start_ticks(os.getpid()),
        "boot": boot_id(), "thread": "MainThread", "host": "127.0.0.1", "port": 5678, "since": time.time(),
        "until": time.time() + 600,
    }  # fmt: skip
    return Stop(**about | other)


def vime(*args: str, stdin: str | None = None, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """``vime debug-attach ARGS``, without a cluster unless ``env`` or ``args`` name one."""
    command = [sys.executable, "-m", "vime_cli", "debug-attach", *args]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PYTHONBREAKPOINT"))}
    environment = environment | {"RAY_ADDRESS": "local"} | (env or {})
    return subprocess.run(
        command, input=stdin or "", capture_output=True, text=True, timeout=SECONDS, check=False, env=environment
    )
