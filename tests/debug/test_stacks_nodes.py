"""Processes that are on another node are reached through the run's own cluster."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from vime.cluster.session import RaySession
from vime.config.schema import Config
from vime.debug import everywhere
from vime.debug.everywhere import look, this_node
from vime.debug.processes import FILE, Member, Roster

SLEEP = [sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"]


@pytest.fixture(scope="module")
def session():
    session = RaySession.start(Config.model_validate({"model": {"path": "m"}, "data": {"prompts": ["p"]}}))
    yield session
    session.close()


@pytest.fixture
def away(session):
    """A process of this machine as another one would see it."""
    process = subprocess.Popen(SLEEP, stdout=subprocess.PIPE)
    process.stdout.readline()
    yield replace(Member.here("trainer", 1, process.pid, this_node()), host="elsewhere")
    process.kill()
    process.wait(10)
    process.stdout.close()


def test_a_task_on_its_node_reads_the_stacks(away):
    here = Member.here("driver")
    found = look([away, here], {}).dumps
    assert [(d.who.name, d.source, d.problem) for d in found] == [
        ("driver", "itself", ""),
        ("trainer rank 1", "py-spy", ""),
    ]
    assert found[1].who == away
    assert found[1].threads[0].frames[-1].function == "<module>"


def test_a_node_that_is_not_there_and_one_that_does_not_answer_are_said(away, monkeypatch):
    gone, unknown = replace(away, node="a" * 56), replace(away, node="")
    problems = [found.problem for found in look([gone, unknown], {}).dumps]
    assert problems[0] == "not reached: it runs on elsewhere"
    assert problems[1].startswith("not reached: on elsewhere: ")
    monkeypatch.setattr(everywhere, "REMOTE_SECONDS", 0.0)
    (found,) = look([away], {}).dumps
    assert found.problem == "not reached: elsewhere had no answer in 0 s"


def test_the_command_joins_the_runs_own_cluster(session, away, tmp_path):
    roster = Roster(tmp_path / FILE, facts={"ray_address": session.address})
    roster.add([Member.here("driver"), away])
    command = [sys.executable, "-m", "vime_cli", "debug-attach", "stacks", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    driver, rank = json.loads(done.stdout)["processes"]
    assert (driver["name"], driver["host"]) == ("driver", Member.here("driver").host)
    assert (rank["name"], rank["host"], rank["source"], rank["problem"]) == (
        "trainer rank 1",
        "elsewhere",
        "py-spy",
        "",
    )


def test_a_cluster_that_cannot_be_joined_is_said(away, tmp_path):
    roster = Roster(tmp_path / FILE, facts={"ray_address": "127.0.0.1:1"})
    roster.add([Member.here("driver"), away])
    command = [sys.executable, "-m", "vime_cli", "debug-attach", "stacks", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "trainer rank 1: not reached: it runs on elsewhere, and no connection to 127.0.0.1:1: " in done.stdout
