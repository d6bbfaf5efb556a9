"""Who a process says it is: roles are said, never inherited; forked and spawned children are no second trainer."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys

import numpy as np
import pytest

from vime.config import schema
from vime.debug.stop import identity
from vime.debug.stop.identity import children_are, introduce, whoami
from vime.reward import RewardPool
from vime.reward.role import CHILD_RANK, CHILD_ROLE, PID, RANK, ROLE
from vime.types import Sample

WHO = """
import json
from vime.debug.stop.identity import whoami
print(json.dumps([whoami().role, whoami().rank]))
"""


@pytest.fixture(autouse=True)
def _own_variables(monkeypatch):
    for name in (ROLE, RANK, PID, CHILD_ROLE, CHILD_RANK, "RANK"):
        monkeypatch.setenv(name, "")  # put back at the end, whatever the test sets
        monkeypatch.delenv(name)


def of_child(**environment: str) -> list[object]:
    """(role, rank) as a Python process that this one starts sees itself."""
    command = [sys.executable, "-c", WHO]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


def tell(queue) -> None:
    queue.put((whoami().role, whoami().rank))


def of_process(method: str) -> tuple[str, int | None]:
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=tell, args=(queue,))
    process.start()
    found = queue.get(timeout=60)
    process.join(60)
    return found


def test_a_script_is_the_driver_with_the_rank_of_its_launcher():
    assert (whoami().role, whoami().rank) == ("driver", None)
    assert of_child(RANK="3") == ["driver", 3]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_what_a_trainer_starts_is_no_trainer(start):
    introduce("trainer", 1)
    assert (whoami().role, whoami().rank, whoami().name) == ("trainer", 1, "trainer 1")
    assert of_process(start) == ("child", None)
    assert of_child() == ["child", None]


def test_a_forked_child_has_not_the_rank_that_its_parent_has_in_its_group(tmp_path):
    import torch.distributed

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'met'}", rank=0, world_size=1)
    try:
        assert (whoami().role, whoami().rank) == ("driver", 0)
        introduce("driver")
        assert whoami().rank == 0
        assert of_process("fork") == ("child", None)
        introduce("trainer", 5)
        assert whoami().rank == 5, "what was said wins"
    finally:
        torch.distributed.destroy_process_group()


def test_processes_of_a_library_have_the_role_that_they_are_started_with():
    introduce("engine", 2)
    with children_are("engine core", 2):
        assert whoami().name == "engine 2"
        assert of_process("fork") == ("engine core", 2)
        assert of_child() == ["engine core", 2]
    assert of_process("fork") == ("child", None)
    with children_are("engine core"):
        introduce("trainer", 0)  # whoever speaks for himself ends what was said of him
    assert CHILD_ROLE not in os.environ
    assert identity.ROLES[3] == "engine core"


def ranked(sample: Sample) -> dict[str, float | str]:
    mine = whoami()
    return {"reward": 0.0 if mine.rank is None else mine.rank, "role": mine.role, "child": of_child()[0]}


def test_reward_workers_say_their_place_and_their_children_that_they_are_none():
    config = schema.Reward(name="user", function="test_roles:ranked", num_workers=2, timeout_seconds=60)
    row = (np.array([1, 2], np.int32), 1, np.zeros(2, bool), np.zeros(2))
    samples = [Sample(0, index, *row) for index in range(8)]
    with RewardPool(config, [os.path.dirname(__file__)]) as pool:
        pool.score([[one] for one in samples])
        assert {worker.rank for worker in pool._alive} == {0, 1}
    found = [one.metadata["reward"] for one in samples]
    assert {(row["role"], row["child"]) for row in found} == {("reward worker", "child")}
