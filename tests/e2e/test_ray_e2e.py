"""`vime train` on a Ray cluster that is already there: by address, and as a submitted job."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import Command, vime

RAY = [str(Path(sys.executable).with_name("ray"))]
START_SECONDS = 120


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """(gcs address, dashboard address) of a cluster of our own on loopback, without authentication."""
    gcs, dashboard, agent, client = free_ports(4)
    temp_dir = tmp_path_factory.mktemp("ray")
    environment = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled"}
    options = ["start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={gcs}", f"--temp-dir={temp_dir}"]
    options += [f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}", "--num-cpus=4"]
    options += [f"--ray-client-server-port={client}", "--disable-usage-stats"]
    head = Command(options, environment, RAY)
    wait_for_port(dashboard, head)
    yield f"127.0.0.1:{gcs}", f"http://127.0.0.1:{dashboard}"
    head.process.terminate()
    head.finish(60)
    assert head.left_behind(30) == []


def free_ports(count):
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def wait_for_port(port, head):
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert head.process.poll() is None, head.process.stdout.read()
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"no dashboard within {START_SECONDS} s")


@pytest.mark.slow
def test_by_address(cluster, workspace, tmp_path):
    command = vime(
        "rollout",
        workspace / "run.toml",
        f"run.dir={tmp_path / 'run'}",
        "-n1",
        "--ray-address",
        cluster[0],
        RAY_AUTH_MODE="disabled",
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
    )
    # Nothing failed but the verdict on the answers, which is right: the model of the workspace is random.
    assert command.process.returncode == 1, command.text
    (failed,) = [line for line in command.lines if line.startswith("error: ")]
    assert failed.startswith("error: check failed: coherence: GARBLED: mean log-prob ")
    assert "rollout 0/1" in command.text


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "status"), [("run.num_rollouts=1", "succeeded"), ("train.lrr=1", "failed")])
def test_as_a_job(cluster, workspace, tmp_path, setting, status):
    """Case T27: the job's status is the command's."""
    entry = f"{sys.executable} -m vime_cli train {workspace}/run.toml run.dir={tmp_path}/run {setting}"
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    submitted = subprocess.run(
        [*RAY, "job", "submit", f"--address={cluster[1]}", "--", *entry.split()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    text = submitted.stdout + submitted.stderr
    assert status in text.lower(), text
    assert ("did you mean train.lr" in text) == (status == "failed")
    assert (submitted.returncode == 0) == (status == "succeeded")
    assert (tmp_path / "run" / "metrics.jsonl").exists() == (status == "succeeded")
