"""Colocation: who is awake when, and engines that do not answer."""

import asyncio
from types import SimpleNamespace

import pytest

from vime.cluster import colocated
from vime.cluster.colocated import ColocatedRollouts, ColocatedTrainer, ColocatedTransport, _all
from vime.errors import VimeError


class Devices:
    """Engine, trainer, rollouts and transport that only note what happens, in order."""

    def __init__(self):
        self.log = []
        self.config = SimpleNamespace(weights=SimpleNamespace(timeout_seconds=5.0))

    async def sleep(self, level):
        self.log.append(f"engine sleeps at level {level}")

    async def wake(self):
        self.log.append("engine wakes")

    def __getattr__(self, name):
        return lambda *args: self.log.append(f"{name} {' '.join(map(str, args))}".strip())


def test_one_side_is_awake_at_a_time():
    d = Devices()
    transport, rollouts, trainer = (
        ColocatedTransport(d, [d], d), ColocatedRollouts(d, [d], d), ColocatedTrainer(d, [d])
    )  # fmt: skip
    colocated.begin([d], d.config)
    transport.sync(0)
    rollouts.produce(0)
    trainer.step("data")
    transport.sync(1)
    trainer.save("path", {})
    assert d.log == [
        "engine sleeps at level 2", "engine wakes", "sync 0", "offload",
        "produce 0", "engine sleeps at level 2", "onload", "step data", "engine wakes", "sync 1", "offload",
        "engine sleeps at level 1", "onload", "save path {}", "offload", "engine wakes",
    ]  # fmt: skip


def test_an_engine_that_does_not_answer_is_not_waited_for_without_end():
    async def hang():
        await asyncio.sleep(60)

    with pytest.raises(VimeError, match=r"colocation: wake of the engines did not end within 0\.1 s"):
        asyncio.run(_all([SimpleNamespace(wake=hang)], 0.1, "wake"))
    assert colocated._limit(Devices()) == 125.0
