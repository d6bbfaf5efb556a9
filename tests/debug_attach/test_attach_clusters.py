"""Clusters are named, never guessed; a token that is missing is told from a cluster that is (cases D12, D20)."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stops import SECONDS, a_run, a_stop, program, stop_of, stopped, vime, wait_for

from vime.debug.attach import clusters, gcs, listing, pausing
from vime.debug.attach.dap import Dap
from vime.debug.attach.sessions import look
from vime.debug.processes import command_line, pids
from vime.debug.stop.records import put_run, put_stop
from vime.debug.stop.registry import GcsRegistry
from vime.debug.stop.spec import Spec
from vime.errors import UsageError

TOKEN = "not-a-secret-of-anybody"
OPEN = {"RAY_AUTH_MODE": "disabled"}
WITH_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
PAUSED = """
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
@ray.remote(num_cpus=0)
def wait():
    import ray.util.rpdb
    ray.util.rpdb.set_trace()
print(flush=True)
ray.get(wait.remote())
"""


def start_cluster(folder: Path, environment: dict[str, str]) -> str:
    """A head without a dashboard; its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", f"--port={port}", "--include-dashboard=false",
        "--num-cpus=1", "--object-store-memory=80000000", f"--temp-dir={folder}", "--disable-usage-stats",
    ]  # fmt: skip
    settings = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | environment
    subprocess.run(command, check=True, capture_output=True, timeout=240, env=settings)
    return next(c.address for c in clusters.local_clusters() if c.temp_dir == str(folder))


def end_cluster(folder: Path) -> None:
    """By pid: what has its folder in the command line."""
    ours = [pid for pid in pids() if str(folder) in command_line(pid)]
    for pid in ours:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    wait_for(lambda: not any(str(folder) in command_line(pid) for pid in ours), "the end of a cluster")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Addresses of two clusters of this user, the second one with token authentication."""
    folders = [tmp_path_factory.mktemp("open"), tmp_path_factory.mktemp("token")]
    try:
        yield tuple(start_cluster(folder, env) for folder, env in zip(folders, (OPEN, WITH_TOKEN), strict=True))
    finally:
        for folder in folders:
            end_cluster(folder)


def only(address: str, monkeypatch) -> None:
    """As if that were the only cluster of the machine: others may have some of their own."""
    found = [c for c in clusters.local_clusters() if c.address == address]
    monkeypatch.setattr(clusters, "local_clusters", lambda: found)


def test_two_clusters_are_listed_and_none_is_chosen(two, registry):
    """Case D12."""
    put_stop(registry, a_stop("here-1"))
    done = vime("list", env={"RAY_ADDRESS": ""} | OPEN)
    assert done.returncode == 2
    assert "Ray clusters on this machine, which one?" in done.stderr
    for address in two:
        (line,) = [line for line in done.stderr.splitlines() if address in line]
        pid = next(c.pid for c in clusters.local_clusters() if c.address == address)
        assert f"pid {pid} (" in line
        assert ", since 20" in line
    assert "here-1" in done.stdout
    assert vime("resume", "here-1", env={"RAY_ADDRESS": ""} | OPEN).returncode == 0  # which needs none of them
    for command in (["connect", "nobody"], ["resume", "--all"], ["pause", "driver"]):
        assert vime(*command, env={"RAY_ADDRESS": ""} | OPEN).returncode == 2


def test_a_name_decides(two, monkeypatch):
    assert clusters.chosen(two[0], {}) == two[0]
    assert clusters.chosen(None, {"RAY_ADDRESS": two[1]}) == two[1]
    assert clusters.chosen(two[0], {"RAY_ADDRESS": two[1]}) == two[0]
    assert clusters.chosen("local", {}) is None
    only(two[0], monkeypatch)
    assert clusters.chosen(None, {}) == two[0]


@pytest.mark.parametrize(
    "address", ["auto", "http://127.0.0.1:8265", "127.0.0.1", "a:b", "ray://h:1", "h:0", "h:99999"]
)
def test_what_is_no_gcs_address_is_refused(address):
    """Case D12: address=auto joins whatever is there."""
    with pytest.raises(UsageError, match="--address = "):
        clusters.chosen(address, {})
    with pytest.raises(UsageError, match="RAY_ADDRESS = "):
        clusters.chosen(None, {"RAY_ADDRESS": address})


def test_the_cluster_of_another_user_is_not_joined(two, monkeypatch):
    only(two[0], monkeypatch)
    monkeypatch.setattr(clusters, "_user_name", lambda uid: "me")
    with pytest.raises(UsageError, match="is another user's"):
        clusters.chosen(None, {})


def test_private_clusters_are_nobodys_business(two, monkeypatch):
    monkeypatch.setattr(clusters, "PRIVATE_PREFIX", "open")
    assert two[0] not in [c.address for c in clusters.local_clusters()]
    assert two[1] in [c.address for c in clusters.local_clusters()]


@pytest.mark.parametrize("environment", [OPEN, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "wrong"}])
def test_a_token_that_is_missing_or_wrong_is_no_missing_cluster(two, registry, environment):
    """Case D20. The token itself is never printed."""
    done = vime("list", "--address", two[1], env=environment)
    assert done.returncode == 2
    assert f"token needed: the cluster at {two[1]}" in done.stderr
    assert "RAY_AUTH_TOKEN" in done.stderr
    found = vime("doctor", "--address", two[1], env=environment)
    assert found.returncode == 1
    assert "token needed" in found.stderr
    assert "authentication: token" in found.stdout.replace("\n", " ")
    assert TOKEN not in done.stderr + done.stdout + found.stdout + found.stderr


def test_no_cluster_is_said_at_once(registry):
    """Case D20: Ray itself would try for 40 s."""
    done = vime("list", "--address", "127.0.0.1:1", env=OPEN)
    assert done.returncode == 3
    assert "no cluster at 127.0.0.1:1" in done.stderr
    assert "token" not in done.stderr


def test_with_the_token_it_answers(two, registry):
    done = vime("doctor", "--address", two[1], "--json", env=WITH_TOKEN)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"] if check["name"] != "found"}
    assert (checks["cluster"]["verdict"], checks["dashboard"]["verdict"]) == ("PASS", "WARN")
    assert TOKEN not in done.stdout
    assert vime("list", "--address", two[1], env=WITH_TOKEN).returncode == 0


def test_a_stop_in_a_cluster_is_listed_attached_to_and_pruned(two, registry, tmp_path, monkeypatch):
    """Case D05: without a dashboard too; that editors list nothing is said."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    there = GcsRegistry(two[0])
    about = {"registry": two[0], "session": "d-gcs", "key": "trainer3-0001", "rank": 3}
    with stopped(program(tmp_path), about) as process:
        put_run(there, a_run("d-gcs", pid=process.pid))
        stop_of(process, there)
        listed = json.loads(vime("list", "--address", two[0], "--json", env=OPEN).stdout)
        assert [(s["key"], s["is_here"]) for s in listed["stops"]] == [("trainer3-0001", True)]
        assert listed["runs"][0]["registry"] == two[0]
        assert "has no dashboard: editors list nothing" in listed["notes"][0]
        done = vime("connect", "rank=3", "--terminal", "--address", two[0], stdin="exec a = 4\nc\n", env=OPEN)
        assert "the process has ended" in done.stdout
        assert process.communicate(timeout=SECONDS)[0] == "result 14\n"
    dead = a_stop("elsewhere", session="d-gcs", hostname="other", node="f" * 56)
    put_stop(there, dead)
    assert "nothing is stopped" in vime("list", "--address", two[0], env=OPEN).stdout
    assert there.names("d-gcs/") == []


def test_a_stop_on_a_living_node_is_kept_until_it_is_late(two, registry):
    node = next(iter(gcs.nodes(two[0])))
    there = GcsRegistry(two[0])
    put_stop(there, a_stop("child-1", session="d-far", hostname="other", node=node))
    put_stop(there, a_stop("child-2", session="d-far", hostname="other", node=node, until=time.time() - 3600))
    listed = vime("list", "--address", two[0], env=OPEN).stdout
    assert "child-1" in listed
    assert "child-2" not in listed
    refused = vime("connect", "child-1", "--address", two[0], env=OPEN)
    assert refused.returncode == 2
    assert "of other (127.0.0.1), not of this machine" in refused.stderr
    there.delete("d-far/stop/child-1")


def test_a_worker_in_rays_own_debugger_is_listed(two, registry, tmp_path):
    """Case D05: it stands in the table of workers, which needs no dashboard."""
    script = tmp_path / "paused.py"
    script.write_text(PAUSED)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | OPEN
    driver = subprocess.Popen([sys.executable, str(script), two[0]], env=environment, stdout=subprocess.DEVNULL)
    try:
        (row,) = wait_for(
            lambda: json.loads(vime("list", "--address", two[0], "--json", env=OPEN).stdout)["ray_paused"], "a worker"
        )
        assert row["kind"] == "ray"
        assert row["port"] > 0
        assert row["num_threads"] == 1
        assert f"pid {row['pid']}" not in vime("list", "--address", two[0], env=OPEN).stderr
        assert "Ray's own debugger" in vime("list", "--address", two[0], env=OPEN).stdout
    finally:
        driver.kill()
        driver.wait(SECONDS)


def test_a_child_of_a_worker_is_on_the_node_of_its_host(two, registry):
    known = gcs.nodes(two[0])
    (node,) = known
    assert gcs.node_of(a_stop(node="n"), known) == "n"
    assert gcs.node_of(a_stop(), known) == node
    assert gcs.node_of(a_stop(hostname="other"), known) == ""


def test_a_process_of_another_node_is_paused_through_a_task_there(two, registry, tmp_path, monkeypatch):
    """Here the node is this machine, which is left out of what is looked at without the cluster."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    file = tmp_path / "loop.py"
    file.write_text("import time\nprint('up', flush=True)\nwhile True:\n    time.sleep(0.01)\n")
    spec = Spec("d-away", gcs=two[0], wait_seconds=600.0).dumps()
    environment = os.environ | {"VIME_DEBUG_SPEC": spec, "RANK": "6"}
    command = [sys.executable, "-m", "vime.debug.stop.runner", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    try:
        assert process.stdout.readline() == b"up\n"
        there = GcsRegistry(two[0])
        put_run(there, a_run("d-away"))
        monkeypatch.setattr(clusters, "own_nodes", list)
        monkeypatch.setattr(pausing, "targets_here", lambda names: [])
        found = pausing.targets(look(two[0]))
        assert [(t.pid, t.rank, t.node) for t in found] == [(process.pid, 6, next(iter(gcs.nodes(two[0]))))]
        stop = pausing.pause(look(two[0]), "rank=6")
        assert (stop.pid, stop.session, stop.point) == (process.pid, "d-away", "pause")
        said = listing.announcement(stop, there)
        assert f"attach: vime debug-attach connect {stop.key} --address {two[0]}, or" in said[2], "from any terminal"
    finally:
        process.kill()
        process.wait(SECONDS)
        process.stdout.close()
    assert look(two[0]).stops == []
    there.delete("d-away/run")


def test_a_tunnel_leads_to_that_port_and_ends_with_the_command(two, registry, tmp_path):
    """Through an actor on the stop's node; here it is the same machine."""
    node = next(iter(gcs.nodes(two[0])))
    about = {"registry": two[0], "session": "d-far", "key": "trainer1-0002", "rank": 1, "node": node}
    with stopped(program(tmp_path), about, "--stay") as process:
        there = GcsRegistry(two[0])
        put_run(there, a_run("d-far"))
        stop_of(process, there)
        command = [sys.executable, "-m", "vime_cli", "debug-attach", "connect", "rank=1", "--forward"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | OPEN
        client = subprocess.Popen(
            [*command, "--address", two[0]], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment, cwd=tmp_path,
        )  # fmt: skip
        try:
            text = ""
            while not text.endswith("\n}\n"):
                line = client.stdout.readline()
                assert line, "it has ended"
                text += line
            port = json.loads(text)["configurations"][0]["connect"]["port"]
            with Dap("127.0.0.1", port, SECONDS) as dap:
                dap.attach()
                thread, _ = dap.stopped()
                top = dap.stack(thread)[0]
                assert {v.name: v.value for v in dap.locals(top)} == {"a": "2", "b": "3"}
                dap.evaluate("a = 7", top)
                dap.detach()
            assert process.stdout.readline() == "result 20\n"
        finally:
            client.send_signal(signal.SIGINT)
            assert client.wait(SECONDS) == 0
            client.stdout.close()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), 5)
        wait_for(lambda: not [p for p in pids() if "FarEnd" in command_line(p)], "the end of the actor")
        there.delete("d-far/stop/trainer1-0002")
        there.delete("d-far/run")
