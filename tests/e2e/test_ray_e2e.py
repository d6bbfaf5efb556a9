"""`vime train` on a Ray cluster that is already there: by address, and as a submitted job."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import Command, vime
from ports import free_ports

from vime.debug.launch.environment import of_a_process
from vime.debug.stop.spec import Spec
from vime.metrics import read_jsonl

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


ASK = """
import json, os, subprocess, sys
from vime.cluster.session import RaySession
from vime.cluster.waiting import gather
from vime.config.schema import Config

CHILD = "import sys; print(sys.breakpointhook.__module__)"

class Worker:
    def ask(self):
        from vime.debug.stop.identity import introduce, whoami
        said = [whoami().role]
        introduce("trainer", 1)
        child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=60, check=True)
        hooks = [sys.breakpointhook.__module__, child.stdout.strip()]
        return [*said, whoami().name, *hooks, os.environ["VIME_DEBUG_SPEC"]]

address = sys.argv[1] if len(sys.argv) > 1 else None
session = RaySession.start(Config(model={"path": "m"}, data={"prompts": ["p"]}, cluster={"ray_address": address}))
import ray
ray.cloudpickle.register_pickle_by_value(sys.modules["__main__"])
try:
    actor = session.start_actor(Worker, "worker", {"num_cpus": 0})
    print(json.dumps(gather({"worker": actor.ask.remote()}, 120, "the question")["worker"]))
finally:
    session.close()
"""
HOOK = "vime.debug.stop.boot"


@pytest.mark.slow
@pytest.mark.parametrize("is_joined", [False, True], ids=["private", "joined"])
def test_a_debug_run_reaches_the_workers_of_a_cluster_and_what_these_start(cluster, tmp_path, is_joined):
    """Case D14: nothing else is between a point and rank 1 of a trainer."""
    spec = Spec("d-ask", folder=str(tmp_path / "registry"))
    plain = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    environment = of_a_process(plain, spec, has_rays_post_mortem=False).value
    command = [sys.executable, "-c", ASK, *([cluster[0]] if is_joined else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    *found, text = json.loads(done.stdout.splitlines()[-1])
    assert found == ["worker", "trainer 1", HOOK, HOOK]
    assert Spec.loads(text) == spec


@pytest.mark.slow
def test_a_saved_replay_is_resumed_with_the_next_id(cluster, workspace, tmp_path, uninterrupted):
    """Case P07, resumed on another cluster: in the end the weights are bitwise those of the run that was recorded."""
    load = ("--load", workspace / "records/data_{rollout_id}.pt")
    run_dir = tmp_path / "run"
    first = vime("replay", workspace / "run.toml", f"run.dir={run_dir}", "-n2", "checkpoint.save_interval=1", *load)
    assert first.process.returncode == 0, first.text
    resumed = vime(
        "train",
        "--resume",
        run_dir,
        "run.num_rollouts=4",
        "checkpoint.export_hf=true",
        "--ray-address",
        cluster[0],
        RAY_AUTH_MODE="disabled",
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
    )
    assert resumed.process.returncode == 0, resumed.text
    assert "next is rollout 2" in resumed.text
    assert "rollout 3/4" in resumed.text
    assert [row["rollout_id"] for row in read_jsonl(run_dir / "metrics.jsonl")] == [0, 1, 2, 3]
    weights = "hf/model.safetensors"
    assert (run_dir / weights).read_bytes() == (uninterrupted[1] / weights).read_bytes()


JOBS = {
    "evaluation alone": ("job.toml run.num_rollouts=0", "succeeded", "eval"),
    "misspelt": ("run.toml train.lrr=1", "failed", "did you mean train.lr"),
    "SystemExit": (
        "job.toml run.num_rollouts=1 reward.name=user reward.function=my_reward:score",
        "failed",
        "SystemExit",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_as_a_job(cluster, workspace, tmp_path, job):
    """Cases T27 and T28: the job's status is the command's; SystemExit inside the reward is a failure with a cause."""
    settings, status, said = JOBS[job]
    (workspace / "my_reward.py").write_text("def score(sample):\n    raise SystemExit(0)\n")
    (workspace / "job.toml").write_text((workspace / "run.toml").read_text() + '[eval]\nprompts = ["prompts.jsonl"]\n')
    entry = f"{sys.executable} -m vime_cli train {workspace}/{settings} run.dir={tmp_path}/run"
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
    assert said in text, text
    assert (submitted.returncode == 0) == (status == "succeeded")
    assert ("user (my_reward:score)" in text) == (job == "SystemExit"), text
    assert f"exit code {({'misspelt': 2, 'SystemExit': 3}).get(job)}" in text or status == "succeeded", text
    if status == "succeeded":
        (row,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
        assert row["eval/num_prompts"] == 10
