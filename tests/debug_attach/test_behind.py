"""Who waits behind a stop, and the smallest time-out left: from what the run noted, never guessed."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from vime.debug.attach.behind import behind
from vime.debug.stop import hold
from vime.debug.stop.records import Stop
from vime.debug.stop.registry import FolderRegistry

LIMITS = {
    "train.step_timeout_seconds": 14400.0,
    "rollout.timeout_seconds": 7200.0,
    "weights.timeout_seconds": 14400.0,
    "cluster.start_timeout_seconds": 14400.0,
    "reward.timeout_seconds": 9000.0,
}


@pytest.fixture
def registry(tmp_path) -> FolderRegistry:
    return FolderRegistry(tmp_path / "registry")


def stop(role: str, rank: int | None, since: float = 1000.0) -> Stop:
    where = {"file": "a.py", "line": 1, "function": "f", "code": "x", "thread": "MainThread", "started": 1, "boot": ""}
    more = {"host": "127.0.0.1", "port": 1, "until": 9e9, "address": "127.0.0.1", "pid": 1, "hostname": "here"}
    key = f"{role}{rank}".replace(" ", "")
    return Stop(key, "d-1", "p0", "breakpoint", role=role, rank=rank, since=since, **where, **more)


def vime(registry: FolderRegistry, trainers: int = 4) -> FolderRegistry:
    registry.put(f"d-1/{hold.NOTE}", {"run_dir": "/r", "trainers": trainers, "engines": 1, "limits": LIMITS})
    return registry


def test_of_a_run_of_vime(registry):
    vime(registry)
    trainers = [stop("trainer", 1), stop("trainer", 3, since=1060.0)]
    assert behind([], registry) == []
    assert behind(trainers[:1], registry, now=1000.0 + 3600) == [
        "at most 3 trainer ranks and the driver wait for trainer 1; smallest time-out: train.step_timeout_seconds, "
        "at most 3 h left"
    ]
    first, second, third, fourth = behind(
        [*trainers, stop("engine core", 0), stop("reward worker", 2), stop("driver", None)], registry, now=1060.0
    )
    assert first.startswith("at most 2 trainer ranks and the driver wait for trainer 1, trainer 3; smallest time-out: ")
    assert first.endswith("at most 3 h 59 min left"), "from the first of them on"
    assert second == (
        "the driver waits for engine core 0; smallest time-out: rollout.timeout_seconds, at most 1 h 59 min left"
    )
    assert "reward worker 2; smallest time-out: rollout.timeout_seconds" in third
    assert fourth == "5 processes of the run wait for driver: without a time-out"
    late = replace(stop("driver", None), point="post-mortem")
    assert behind([late], registry) == ["nothing waits for driver: the rest of its run has ended"]
    assert behind([stop("child", None)], registry) == ["who waits for child is not known"]


def test_when_all_ranks_have_stopped_the_driver_alone_waits(registry):
    vime(registry, trainers=2)
    (line,) = behind([stop("trainer", 0), stop("trainer", 1)], registry, now=99999.0)
    assert line.startswith("the driver waits for trainer 0, trainer 1; ")
    assert line.endswith("at most 0 s left")


def test_of_another_program(registry, tmp_path):
    alone = stop("driver", 0)
    assert behind([alone], registry) == ["who waits for driver 0 is not known: it has no group of torch.distributed"]
    import torch.distributed

    where = f"file://{tmp_path / 'met'}"
    torch.distributed.init_process_group("gloo", where, timedelta(seconds=90), world_size=1, rank=0)
    try:
        hold.note_group(registry, alone)
    finally:
        torch.distributed.destroy_process_group()
    facts = registry.get(f"d-1/{hold.GROUP}/driver0")
    assert facts == {"size": 1, "backend": "gloo", "seconds": 90.0}
    assert behind([alone], registry) == ["no other rank waits for driver 0"]
    registry.put(f"d-1/{hold.GROUP}/driver0", facts | {"size": 3})
    assert behind([alone], registry, now=1030.0) == [
        "at most 2 ranks wait for driver 0 in collectives; time-out of the group (gloo): at most 1 min left"
    ]
