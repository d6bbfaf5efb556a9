"""``vime debug-attach run`` as its user starts it, with everything it starts, and the client that attaches to it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from ports import free_ports

from vime.debug.attach.dap import Dap
from vime.debug.attach.sessions import members_of
from vime.debug.stop.records import runs, stops
from vime.debug.stop.registry import FolderRegistry

VIME = [sys.executable, "-m", "vime_cli"]
SECONDS = 120


class DebugRun:
    """One debug run. ``registry``: where its stops are; output goes to files, to be read at any time."""

    def __init__(self, folder: Path, arguments, registry=None, **environment):
        self.folder = folder
        base = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "VIME_", "PYTHONBREAKPOINT"))}
        path = f"{Path(sys.executable).parent}{os.pathsep}{base['PATH']}"
        base |= {"TMPDIR": str(folder), "PATH": path, "COLUMNS": "200"} | environment
        self.registry = registry or FolderRegistry(folder / f"vime-debug-{os.getuid()}")
        self._out, self._err = folder / "stdout.txt", folder / "stderr.txt"
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            command = [*VIME, "debug-attach", "run", *map(str, arguments)]
            nothing = subprocess.DEVNULL
            self.process = subprocess.Popen(command, stdin=nothing, stdout=out, stderr=err, env=base, cwd=folder)

    @property
    def out(self):
        return self._out.read_text()

    @property
    def err(self):
        return self._err.read_text()

    def stop(self, number=0):
        """The record of the (number+1)-th stop that is there."""
        return self.until(lambda: (stops(self.registry, self.session) or [None] * (number + 1))[number:][:1])[0]

    @property
    def session(self):
        line = self.until(lambda: [line for line in self.err.splitlines() if "debug run d-" in line])[0]
        return line.split("debug run ")[1].split()[0]

    def until(self, found, what="what was waited for"):
        """The first result with something in it; fails where the run has ended before, or it takes too long."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            if (result := found()) and result != [None]:
                return result
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.out}\n{self.err}"
            time.sleep(0.05)
        raise AssertionError(f"{what}: not within {SECONDS} s\n{self.out}\n{self.err}")

    def end(self):
        """Exit code."""
        return self.process.wait(SECONDS)

    def is_clean(self):
        """Whether neither a process nor an entry is left; waits for it a little."""
        session, deadline = self.session_said, time.monotonic() + 30
        while time.monotonic() < deadline:
            if not members_of(session) and not self.registry.names(f"{session}/"):
                return True
            time.sleep(0.1)
        return False

    @property
    def session_said(self):
        return self.err.split("debug run ")[1].split()[0]

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(SECONDS)


@contextmanager
def debug_run(folder, *arguments, **options):
    """It is ended with the block."""
    run = DebugRun(folder, arguments, **options)
    try:
        yield run
    finally:
        run.close()


@contextmanager
def attached(stop, **options):
    """(client, id of the stopped thread) of a stop; the client leaves at the end of the block."""
    with Dap(stop.host, stop.port, seconds=60) as client:
        client.attach(**options)
        yield client, client.stopped()[0]


def values(client, thread):
    """Names and values of the locals in the innermost frame."""
    return {v.name: v.value for v in client.locals(client.stack(thread)[0])}


def live_runs(registry):
    return [run.session for run in runs(registry)]


@contextmanager
def ray_cluster(temp_dir):
    """(GCS address, dashboard URL) of a cluster of our own on loopback, without authentication."""
    gcs, dashboard, agent, client = free_ports(4)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled", "PATH": path}
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=4"]
    command += ["--node-ip-address=127.0.0.1", f"--port={gcs}", f"--temp-dir={temp_dir}", "--disable-usage-stats"]
    command += [f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"]
    command += [f"--ray-client-server-port={client}"]
    with open(temp_dir / "start.txt", "wb") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + SECONDS
        while not _answers(dashboard):
            assert head.poll() is None, (temp_dir / "start.txt").read_text()
            assert time.monotonic() < deadline, "no dashboard"
            time.sleep(0.2)
        yield f"127.0.0.1:{gcs}", f"http://127.0.0.1:{dashboard}"
    finally:
        head.terminate()
        head.wait(SECONDS)


def _answers(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
