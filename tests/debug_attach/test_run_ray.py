"""``vime debug-attach run`` as a job of a real cluster with a dashboard, and as a driver that joins one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest
from debug_runs import VIME, attached, debug_run, ray_cluster, values

from vime.debug.attach.sessions import members_of
from vime.debug.processes import command_line
from vime.debug.stop.registry import GcsRegistry

RAY = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Of whoever talks to the cluster: the second keeps its address on loopback."""
GUIDE = """\
import sys

import ray


def train(arguments):
    return len(arguments)


if __name__ == "__main__":
    if "--init" in sys.argv:
        ray.init()
    breakpoint()
    count = train(sys.argv[1:])
    print("trained", count)
"""
WORKERS = """\
import json, os, sys
import ray


@ray.remote(num_cpus=0.1)
class Trainer:
    def __init__(self, rank):
        os.environ["RANK"] = str(rank)
        self.rank = rank

    def step(self, number):
        doubled = number * 2
        return doubled // (0 if self.rank == 1 and "--fail" in sys.argv or FAILS else 1)

    def environment(self):
        return dict(os.environ)


FAILS = "--fail" in sys.argv
"""
DRIVER = """
if __name__ == "__main__":
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": "/programs", "VLLM_ENGINE_READY_TIMEOUT_S": "5"}})
    trainers = [Trainer.remote(rank) for rank in range(2)]
    print("environment", json.dumps(ray.get(trainers[1].environment.remote())))
    print("namespace", ray.get_runtime_context().namespace)
    print("steps", ray.get([trainer.step.remote(3) for trainer in trainers]))
"""
FAILING = """\
import ray


@ray.remote(num_cpus=0.1)
class Worker:
    def step(self, number):
        parts = number - 3
        return 12 / parts


def main():
    worker = Worker.remote()
    return ray.get(worker.step.remote(3))


ray.init()
main()
"""
HOOK = """\
import os


def prepare():
    os.environ["HOOKED"] = "yes"
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ray_cluster(tmp_path_factory.mktemp("ray")) as addresses:
        yield addresses


@pytest.fixture
def sources(tmp_path):
    """A folder with the programs, which is the working_dir of a job."""
    folder = tmp_path / "src"
    folder.mkdir()
    for name, text in (("guide", GUIDE), ("workers", WORKERS + DRIVER), ("failing", FAILING), ("hooks", HOOK)):
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture
def job(tmp_path, sources, cluster):
    """Starts a debug run that submits a job."""

    def start(*arguments, **options):
        submitted = ["--submit", cluster[1], "--working-dir", "src"]
        return debug_run(tmp_path, *submitted, *arguments, registry=GcsRegistry(cluster[0]), **RAY, **options)

    return start


@pytest.fixture(autouse=True)
def _no_authentication(monkeypatch):
    for name, value in RAY.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("options", [[], ["--init"]])
def test_the_guides_recipe_with_and_without_ray_init(job, sources, options):
    """Case D01: no AttributeError either way."""
    began = time.monotonic()
    with job("--", "python3", "guide.py", *options) as run:
        stop = run.stop()
        print(f"submit to stopped: {time.monotonic() - began:.1f} s")
        how = f"connect {stop.key} --address {run.registry.where}, or a client of your own to 127.0.0.1:{stop.port}"
        run.until(lambda: how in run.err)
        assert (stop.line, stop.who, stop.reason) == (13, "driver", "breakpoint()")
        with attached(stop) as (client, thread):
            assert os.path.basename(client.stack(thread)[0].file) == "guide.py"
            while client.stack(thread)[0].line < 15:
                client.go("next", thread)
                client.stopped()
            assert client.evaluate("count", client.stack(thread)[0]) == str(len(options))
            client.detach()
        assert run.end() == 0
    assert f"trained {len(options)}" in run.out
    assert f"attach: vime debug-attach connect {stop.key} --address {run.registry.where};" in run.out, (
        "in its log as well"
    )
    assert "AttributeError" not in run.out + run.err
    assert run.is_clean()


def test_a_point_in_one_rank_of_a_job_with_an_environment_of_its_own(job, sources):
    """Cases D09, D13, D14, D18: what the job brings is all there, in each worker; only what is named is added."""
    before = (sources / "workers.py").read_bytes()
    many = {f"MANY_{i}": f"value {i}" for i in range(500)} | {"ODD": '{"a":\n"}"}\n\'"', "NCCL_DEBUG": "INFO"}
    own = {"env_vars": many, "worker_process_setup_hook": "hooks.prepare"}
    options = ["-b", "src/workers.py:12", "--rank", "1", "--if", "number == 3", "--runtime-env-json", json.dumps(own)]
    with job(*options, "--", "python3", "workers.py", ONLY_HERE="1") as run:
        stop = run.stop()
        assert (stop.line, stop.rank, stop.function) == (12, 1, "Trainer.step")
        assert stop.local_root == str(sources)
        mapping = {"localRoot": stop.local_root, "remoteRoot": stop.remote_root}
        with attached(stop, path_mappings=[mapping]) as (client, thread):
            assert client.stack(thread)[0].file == str(sources / "workers.py")
            client.evaluate("number = 25", client.stack(thread)[0])
            client.detach()
        assert run.end() == 0
    assert "steps [6, 50]" in run.out
    lines = dict(line.split(" ", 1) for line in run.out.splitlines() if line.startswith(("environment", "namespace")))
    found = json.loads(lines["environment"])
    assert found.items() >= many.items()
    assert found["HOOKED"] == "yes"
    assert "/programs" in found["PYTHONPATH"].split(os.pathsep)
    assert (found["VLLM_ENGINE_READY_TIMEOUT_S"], found["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"]) == ("5", "14400")
    assert "ONLY_HERE" not in found
    assert "p0 src/workers.py:12: 1 stop" in run.err
    assert "hooks.prepare is called as well" in run.err
    assert (sources / "workers.py").read_bytes() == before


def test_post_mortem_in_an_actor_and_in_the_driver_by_the_guides_variable(job):
    """Cases D02 and D03: its spelling is accepted, Ray's own is set, and a worker says so."""
    own = json.dumps({"env_vars": {"RAY_DEBUG_POSTMORTEM": "1"}})
    with job("--rank", "all", "--runtime-env-json", own, "--", "python3", "failing.py") as run:
        stop = run.stop()
        assert (stop.line, stop.function, stop.role) == (8, "Worker.step", "worker")
        assert stop.reason == "ZeroDivisionError: division by zero"
        run.until(lambda: f"connect {stop.key} --address" in run.err)
        with attached(stop) as (client, thread):
            assert values(client, thread).items() >= {"number": "3", "parts": "0"}.items()
            client.detach()
        driver = run.until(lambda: [s for s in [run.stop()] if s.role == "driver"])[0]
        assert (driver.line, driver.function) == (13, "main")
        with attached(driver) as (client, _):
            client.detach()
        assert run.end() == 1
    assert run.err.count("RAY_DEBUG_POSTMORTEM is a name that Ray does not read") == 1
    assert "has RAY_DEBUG_POST_MORTEM=1" in run.err
    assert "ZeroDivisionError: division by zero" in run.out
    assert "post-mortem: 2 stops" in run.err
    assert "FAILED, exit code 1" in run.err


def test_ctrl_c_stops_the_job(job, cluster):
    from vime.debug.launch.job import client_of

    with job("-b", "src/workers.py:12", "--rank", "1", "--", "python3", "workers.py") as run:
        stop = run.stop()
        name = run.session
        run.until(lambda: f"worker 1 stopped at {stop.file}:12" in run.out, "the job's log says it too")
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130
    assert "it stays" not in run.out, "nothing waits for a stop of a run that ends"
    assert [str(found.status) for found in jobs_of(client_of(cluster[1]), name)] == ["STOPPED"]
    assert run.is_clean()


def jobs_of(client, session):
    return [found for found in client.list_jobs() if session in found.entrypoint]


def test_a_killed_run_leaves_its_job_to_stop(job, cluster, tmp_path):
    from vime.debug.launch.job import client_of

    with job("--", "python3", "guide.py") as run:
        run.stop()
        run.until(lambda: "has stopped" in run.err)
        name = run.session
        run.process.kill()
        run.end()
    assert [str(found.status) for found in jobs_of(client_of(cluster[1]), name)] == ["RUNNING"]
    command = [*VIME, "debug-attach", "stop", name, "--address", cluster[0]]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert [str(found.status) for found in jobs_of(client_of(cluster[1]), name)] == ["STOPPED"]
    assert run.is_clean()


@pytest.mark.parametrize("options", [[], ["--init"]])
def test_rays_own_debugger_lists_it(job, cluster, options):
    """What its extension asks: workers with paused threads, and their port; in the job's own cluster and namespace."""
    from ray.util.state import list_workers

    own = ["--runtime-env-json", json.dumps({"env_vars": {"OF_THE_JOB": "here"}})]
    with job("--ray-debugger", "-b", "src/guide.py:14", *own, "--", "python3", "guide.py", *options) as run:
        first = run.stop()
        paused = run.until(lambda: paused_workers(list_workers, cluster[1]))
        assert [(row.pid, row.debugger_port, row.num_paused_threads) for row in paused] == [(first.pid, first.port, 1)]
        assert not any("gcs_server" in command_line(pid) for pid in members_of(run.session)), "a cluster of its own"
        with attached(first) as (client, thread):
            frame = client.stack(thread)[0]
            assert frame.line == 14
            if options:  # else it has joined for as long as it waited
                context = "__import__('ray').get_runtime_context()"
                asked = ("gcs_address", "runtime_env['env_vars']['OF_THE_JOB']", "get_job_id()")
                address, variable, name = (client.evaluate(f"{context}.{what}", frame) for what in asked)
                assert (address, variable, name) == (f"'{cluster[0]}'", "'here'", f"'{first.job}'")
            client.detach()
        assert run.end() == 0
    assert "trained" in run.out
    assert first.job
    assert options or f"joined the job's cluster at {cluster[0]} for this stop: 1 node(s), namespace" in run.out


def paused_workers(list_workers, address):
    found = list_workers(address=address, detail=True, raise_on_missing_output=False)
    return [row for row in found if row.is_alive and row.num_paused_threads]


def test_a_driver_of_this_machine_joins_the_cluster_that_is_named(tmp_path, sources, cluster):
    options = ["--address", cluster[0], "-b", "src/workers.py:12", "--rank", "1"]
    registry = GcsRegistry(cluster[0])
    with debug_run(tmp_path, *options, "--", "python3", "src/workers.py", registry=registry, **RAY) as run:
        stop = run.stop()
        assert (stop.line, stop.rank) == (12, 1)
        with attached(stop) as (client, _):
            client.detach()
        assert run.end() == 0
    assert "steps [6, 6]" in run.out
    assert run.is_clean()
