"""Stops in a real cluster: tasks, all kinds of actors, functions of __main__ shipped by value; its GCS as registry."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ports import free_port

from vime.debug.stop.records import RUNNING, release, stops
from vime.debug.stop.registry import GcsRegistry
from vime.debug.stop.spec import Who
from vime.errors import VimeError

CLUSTER_SECONDS = 120.0
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Or Ray takes the outer address in place of 127.0.0.1."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a cluster of our own, without a dashboard."""
    folder = tmp_path_factory.mktemp("ray")
    address = f"127.0.0.1:{free_port()}"
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"} | LOOPBACK
    ray = Path(sys.executable).with_name("ray")
    words = ["start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={address.rpartition(':')[2]}"]
    words += ["--num-cpus=8", "--include-dashboard=false", f"--temp-dir={folder}", "--disable-usage-stats"]
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen([ray, *words], env=environment, stdout=log, stderr=log, start_new_session=True)
    before = os.environ.get("RAY_AUTH_MODE")
    os.environ["RAY_AUTH_MODE"] = "disabled"
    try:
        deadline = time.monotonic() + CLUSTER_SECONDS
        while "Ray runtime started" not in (folder / "log.txt").read_text():
            assert process.poll() is None, (folder / "log.txt").read_text()
            assert time.monotonic() < deadline, (folder / "log.txt").read_text()
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(60)
        os.environ.pop("RAY_AUTH_MODE") if before is None else os.environ.update(RAY_AUTH_MODE=before)


@pytest.fixture
def ray_run(debug_run: Any, cluster: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A debug run whose driver joins the cluster: its registry is the GCS."""
    session = f"d-{request.node.name[-20:]}"
    debug_run.set(gcs=cluster, folder="", session=session)
    debug_run.registry = GcsRegistry(cluster)
    debug_run.environment |= {"RAY_ADDRESS": cluster, "RAY_AUTH_MODE": "disabled"} | LOOPBACK
    plain = debug_run.environ

    def environ() -> dict[str, str]:
        found = plain()
        mine = {name: found[name] for name in ("VIME_DEBUG_SPEC", "PYTHONPATH")}
        job = {"env_vars": mine, "worker_process_setup_hook": "vime.debug.stop.worker.set_up"}
        return found | {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": job, "metadata": {}})}

    debug_run.environ = environ
    yield debug_run
    # one that runs on with its client may be ended by Ray with its driver: nobody is left to take it back
    left = [stop for stop in stops(debug_run.registry, session) if stop.state != RUNNING]
    for name in debug_run.registry.names(f"{session}/"):
        debug_run.registry.delete(name)
    assert left == []


def test_the_registry_in_the_gcs(cluster: str) -> None:
    registry = GcsRegistry(cluster)
    assert registry.get("d-t/a") is None
    registry.put("d-t/a", {"x": 1})
    assert registry.claim("d-t/a", {"x": 2}) is False
    assert registry.claim("d-t/b", {"x": 2}) is True
    registry.put("d-t/a", {"x": 3})
    assert (registry.get("d-t/a"), registry.names("d-t/")) == ({"x": 3}, ["d-t/a", "d-t/b"])
    for name in ("d-t/a", "d-t/b", "d-t/b"):
        registry.delete(name)
    assert registry.names("d-t/") == []


def test_a_cluster_that_is_not_there_is_an_error_in_bounded_time() -> None:
    with pytest.raises(VimeError, match="does not answer"):
        GcsRegistry(f"127.0.0.1:{free_port()}").get("d-t/a")


def test_a_function_of_main_in_a_task_and_the_namespace_is_kept(ray_run: Any, attached: Any) -> None:
    ray_run.write(
        "train.py",
        """
        import multiprocessing, os
        import ray

        def compute(i):
            total = i * 2
            return total + 1

        @ray.remote
        def task(i):
            return compute(i)

        ray.init(namespace="vime-test", runtime_env={"env_vars": {"MINE": "1"}}, log_to_driver=True)
        print("RESULT", ray.get([task.remote(i) for i in range(3)]), ray.get_runtime_context().namespace, flush=True)
        forked = multiprocessing.get_context("fork").Process(target=lambda: os._exit(compute(4)))
        forked.start()
        forked.join(60)  # Ray's own client would wait for ever there
        print("FORKED", forked.exitcode, flush=True)
        forked.kill()
        """,
    )
    ray_run.point("train.py", "return total + 1", condition="i == 1")
    started = ray_run.start("train.py")
    stop = started.stops()[0]
    assert (stop.role, stop.function, stop.line) == ("worker", "compute", 6)
    assert stop.job
    assert stop.node
    client = attached(stop)
    assert client.at == ("compute", "train.py", 6)
    assert client.locals() == {"i": "1", "total": "2"}
    client.dap.evaluate("total = 50", client.stack[0])
    client.leave()
    code, said = started.end()
    assert (code, "RESULT [1, 51, 5] vime-test" in said, "FORKED 9" in said) == (0, True, True), said
    tally = [ray_run.registry.get(name) for name in ray_run.registry.names(f"{ray_run.spec.session}/tally/")]
    assert "child" in [one["who"] for one in tally], tally


ACTORS = """
    import os
    import ray
    from vime.debug.stop.identity import introduce

    @ray.remote
    class Worker:
        def __init__(self, rank):
            introduce("trainer", rank)
            self.rank = rank

        def step(self, x):
            y = x + self.rank
            return y

    ray.init()
    workers = [Worker.remote(rank) for rank in range({number})]
    print("RESULT", ray.get([w.step.remote(10) for w in workers]), flush=True)
"""


def test_rank_1_of_2(ray_run: Any, attached: Any) -> None:
    ray_run.write("train.py", ACTORS.format(number=2))
    ray_run.point("train.py", "y = x + self.rank", who=Who(roles=("trainer",), ranks=(1,)))
    started = ray_run.start("train.py")
    stop = started.stops()[0]
    assert (stop.who, stop.key[:9], bool(stop.actor)) == ("trainer 1", "trainer1-", True)
    client = attached(stop)
    assert client.at == ("step", "train.py", 12)
    client.leave()
    code, said = started.end()
    assert (code, "RESULT [10, 11]" in said) == (0, True), said
    tally = [ray_run.registry.get(n) for n in ray_run.registry.names(f"{ray_run.spec.session}/tally/")]
    assert sorted((t["who"], t["is_selected"], t["num_stops"]) for t in tally) == [
        ("trainer 0", False, 0),
        ("trainer 1", True, 1),
    ]


def test_the_first_of_3_and_all_of_3(ray_run: Any) -> None:
    ray_run.write("train.py", ACTORS.format(number=3))
    ray_run.point("train.py", "y = x + self.rank", who=Who(is_first=True))
    ray_run.point("train.py", "return y")
    started = ray_run.start("train.py")
    first = started.stops(3)
    assert sorted(s.point for s in first) == ["p0", "p1", "p1"]
    release(ray_run.registry, [s for s in first if s.point == "p0"])
    started.until(lambda: {s.point for s in stops(ray_run.registry)} == {"p1"}, "the last one at p1")
    found = started.stops(3)
    assert {s.who for s in found} == {"trainer 0", "trainer 1", "trainer 2"}
    assert len({s.pid for s in found}) == 3
    assert len({s.port for s in found}) == 3
    release(ray_run.registry, found)
    code, said = started.end()
    assert (code, "RESULT [10, 11, 12]" in said) == (0, True), said


def test_threaded_and_async_actors(ray_run: Any, attached: Any) -> None:
    ray_run.write(
        "train.py",
        """
        import asyncio
        import ray

        @ray.remote(max_concurrency=2)
        class Threaded:
            def wait(self, x):
                y = x
                return y

        @ray.remote
        class Async:
            async def wait(self, x):
                await asyncio.sleep(0)
                z = x
                return z

        ray.init()
        a, b = Threaded.remote(), Async.remote()
        print("RESULT", ray.get([a.wait.remote(1), a.wait.remote(2), b.wait.remote(3)]), flush=True)
        """,
    )
    ray_run.point("train.py", "y = x", is_every=True)
    ray_run.point("train.py", "z = x")
    started = ray_run.start("train.py")
    found = started.stops(3)
    threaded = [s for s in found if s.point == "p0"]
    assert len({s.pid for s in threaded}) == 1
    assert len({s.thread for s in threaded}) == 2
    one = next(s for s in found if s.point == "p1")
    client = attached(one)
    assert (client.stack[0].name, client.locals()["x"]) == ("wait", "3")
    client.leave()
    release(ray_run.registry, threaded)
    code, said = started.end()
    assert (code, "RESULT [1, 2, 3]" in said) == (0, True), said


def test_an_error_of_an_actor_stops_there_and_reaches_the_driver(ray_run: Any, attached: Any) -> None:
    ray_run.write(
        "train.py",
        """
        import ray

        @ray.remote
        class Worker:
            def divide(self, x):
                return 10 / x

        ray.init()
        w = Worker.remote()
        try:
            ray.get(w.divide.remote(0))
        except ZeroDivisionError as error:
            print("CAUGHT", type(error).__name__, flush=True)
        print("RESULT", ray.get(w.divide.remote(5)), flush=True)
        """,
    )
    ray_run.set(post_mortem=Who())
    started = ray_run.start("train.py")
    stop = started.stops()[0]
    assert (stop.point, stop.reason, stop.line) == ("post-mortem", "ZeroDivisionError: division by zero", 6)
    client = attached(stop, exceptions=())
    assert client.at == ("divide", "train.py", 6)
    assert client.locals()["x"] == "0"
    client.leave()
    code, said = started.end()
    assert code == 0, said
    assert "CAUGHT RayTaskError(ZeroDivisionError)" in said
    assert "RESULT 2.0" in said


def test_a_task_that_nobody_waits_for_keeps_the_program_alive(ray_run: Any, attached: Any) -> None:
    ray_run.write(
        "train.py",
        """
        import ray

        @ray.remote
        def task(i):
            j = i
            return j

        ray.init()
        task.remote(1)
        print("END", flush=True)
        """,
    )
    ray_run.point("train.py", "j = i")
    started = ray_run.start("train.py")
    stop = started.stops()[0]
    started.said("the main program has ended; it stays until")
    client = attached(stop)
    assert client.locals()["i"] == "1"
    client.leave()
    code, said = started.end()
    assert code == 0
    assert "the main program has ended; it stays for up to" in said


def test_the_cluster_goes_while_somebody_waits(ray_run: Any, cluster: str) -> None:
    """A registry that does not answer lets the process go on."""
    ray_run.write("train.py", "x = 1\ny = 2\nprint('RESULT', x + y)\n")
    ray_run.point("train.py:2")
    ray_run.set(gcs=f"127.0.0.1:{free_port()}")
    code, said = ray_run.start("train.py").end()
    assert (code, "RESULT 3" in said, "goes on without a stop" in said) == (0, True, True), said


def test_rays_own_debugger_lists_the_stop_and_is_on_the_line(ray_run: Any, attached: Any) -> None:
    ray_run.write(
        "train.py",
        """
        x = 1
        y = x + 1
        import ray
        ray.init(namespace="later")
        print("RESULT", y, ray.get_runtime_context().namespace, flush=True)
        """,
    )
    ray_run.point("train.py", "y = x + 1")
    ray_run.set(is_ray_debugger=True)
    ray_run.environment["RAY_DEBUG"] = "1"
    started = ray_run.start("train.py")
    stop = started.stops()[0]
    assert f"joined the job's cluster at {ray_run.spec.gcs} for this stop: 1 node(s)" in started.log.read_text()
    assert paused(ray_run.spec.gcs) == [(1, stop.port)]
    client = attached(stop)
    assert client.at == ("<module>", "train.py", 2)
    client.leave()
    code, said = started.end()
    assert (code, "RESULT 2 later" in said) == (0, True), said
    assert paused(ray_run.spec.gcs) == []


def test_rays_own_debugger_in_actors(ray_run: Any, attached: Any) -> None:
    ray_run.write("train.py", ACTORS.format(number=2))
    ray_run.point("train.py", "y = x + self.rank")
    ray_run.set(is_ray_debugger=True)
    started = ray_run.start("train.py")
    found = started.stops(2)
    assert sorted(paused(ray_run.spec.gcs)) == sorted((1, s.port) for s in found)
    client = attached(found[0])
    assert client.at == ("step", "train.py", 12)
    client.leave()
    release(ray_run.registry, found[1:])
    code, said = started.end()
    assert (code, "RESULT [10, 11]" in said) == (0, True), said


def paused(address: str) -> list[tuple[int, int]]:
    """(paused threads, port) of the workers that Ray's table says are paused; asked in a process of its own."""
    script = """
import sys
from ray._private.state import state
from ray._raylet import GcsClientOptions
from ray.core.generated.gcs_pb2 import WorkerTableData
state._initialize_global_state(GcsClientOptions.create(sys.argv[1], None, True, True))
rows = [WorkerTableData.FromString(row) for row in state._connect_and_get_accessor().get_worker_table()]
print([(r.num_paused_threads, r.debugger_port) for r in rows if r.num_paused_threads])
"""
    done = subprocess.run([sys.executable, "-c", script, address], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [tuple(row) for row in json.loads(done.stdout.replace("(", "[").replace(")", "]"))]
