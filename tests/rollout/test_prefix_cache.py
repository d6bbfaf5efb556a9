"""Prompt tokens that engines had in their caches: counted per rollout, for all engines together."""

import asyncio
from dataclasses import dataclass, field

import pytest
from fakes import FakeEngine

from vime.errors import VimeError
from vime.rollout import prefix_cache
from vime.rollout.prefix_cache import CountedRollouts


@dataclass
class Counting(FakeEngine):
    counts: tuple[int, int] = (0, 0)

    async def prefix_cache(self):
        return self.counts


@dataclass
class Rollouts:
    """Each rollout asks every engine for 10 prompt tokens, of which 4 are cached."""

    engines: list[Counting]
    produced: list[int] = field(default_factory=list)

    def produce(self, rollout_id):
        self.produced.append(rollout_id)
        for engine in self.engines:
            engine.counts = (engine.counts[0] + 10, engine.counts[1] + 4)
        return rollout_id

    def state_dict(self):
        return {"produced": self.produced}


def test_what_was_counted_before_belongs_to_no_rollout():
    engines = [Counting(counts=(1000, 1000)), Counting()]
    reported = []
    rollouts = CountedRollouts(Rollouts(engines), engines, reported.append)
    assert [rollouts.produce(i) for i in (0, 1)] == [0, 1]
    assert reported == [(20, 8), (20, 8)]
    assert rollouts.state_dict() == {"produced": [0, 1]}


def test_an_engine_that_hangs(monkeypatch):
    monkeypatch.setattr(prefix_cache, "ANSWER_SECONDS", 0.05)

    class Hanging(Counting):
        async def prefix_cache(self):
            await asyncio.sleep(60)

    with pytest.raises(VimeError, match=r"did not say within 0\.05 s"):
        CountedRollouts(Rollouts([]), [Hanging()], print).produce(0)


def test_an_engine_that_does_not_count():
    engines = [Counting()]
    reported = []
    CountedRollouts(Rollouts(engines), [*engines, FakeEngine()], reported.append).produce(0)
    assert reported == [None]
