"""The bench's own logic, without processes: facts once, failures told once, sides that end, devices that are shared."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from vime.align.bench import Unavailable
from vime.errors import UsageError, VimeError
from vime.runs.bench import LiveBench
from vime.runs.sides import Devices, Life, ending
from vime.types import Verification, WeightManifest


@pytest.fixture
def bench() -> LiveBench:
    return LiveBench(SimpleNamespace(config=None), Path("none"), SimpleNamespace(), ExitStack())


def test_a_fact_is_made_once(bench: LiveBench) -> None:
    made: list[int] = []
    assert [bench.fact("x", lambda: made.append(1) or 7) for _ in range(3)] == [7, 7, 7]
    assert made == [1]


def test_the_first_check_gets_the_error_and_later_ones_what_it_was(bench: LiveBench) -> None:
    tries: list[int] = []

    def fails() -> int:
        tries.append(1)
        raise UsageError("no room\ndetails", "make room")

    bench.check = "weights"
    for _ in range(2):  # a check may ask twice
        with pytest.raises(UsageError, match="no room"):
            bench.fact("the sync", fails)
    bench.check = "coherence"
    with pytest.raises(Unavailable) as error:
        bench.fact("the sync", fails)
    assert error.value.message == "the sync failed in check weights: no room"
    assert tries == [1]


def test_a_failure_that_was_got_over_is_left_to_the_check_that_asks_for_it(bench: LiveBench) -> None:
    def fails() -> int:
        raise UsageError("refused")

    bench.check = "coherence"
    assert bench._attempt("the sync", lambda: bench.fact("the sync", fails)).message == "refused"
    bench.check = "weights"
    with pytest.raises(UsageError, match="refused"):
        bench.fact("the sync", fails)
    bench.check = "second"
    with pytest.raises(Unavailable, match="failed in check weights"):
        bench.fact("the sync", fails)


def test_what_rests_on_a_failed_fact_fails_with_it_and_is_not_itself_failed(bench: LiveBench) -> None:
    def fails() -> int:
        raise VimeError("engine 0 died")

    rests = lambda: bench.fact("rollout", lambda: bench.fact("engines", fails))  # noqa: E731
    bench.check = "weights"
    with pytest.raises(VimeError, match="engine 0 died"):
        rests()
    bench.check = "size"
    with pytest.raises(Unavailable, match="failed in check weights: engine 0 died"):
        rests()


@pytest.mark.parametrize(
    ("end", "raised"), [("an engine ended in check decode: killed", None), ("", "ending the engines")]
)
def test_that_a_dead_side_cannot_be_ended_does_not_hide_what_was_found(end: str, raised: str | None) -> None:
    said: list[str] = []

    def fails() -> None:
        raise VimeError("ending the engines: engine 0 died\ndetails")

    life = Life("an engine", lambda: "decode", fails, end)
    with nullcontext() if raised is None else pytest.raises(VimeError, match=raised), ExitStack() as all_ends:
        all_ends.enter_context(ending(life, SimpleNamespace(warn=said.append))).callback(fails)
    assert said == ([] if raised else [f"{end}; ending the engines: engine 0 died"])
    with pytest.raises(KeyError), ending(life, SimpleNamespace(warn=said.append)):
        raise KeyError("in the walk")


def test_a_side_that_ended_makes_the_rest_unavailable() -> None:
    """An error with the side alive is the check's alone."""
    alive = [True]

    def ping() -> None:
        if not alive[0]:
            raise VimeError("dead")

    life = Life("an engine", lambda: "decode", ping)
    with pytest.raises(VimeError, match="refused"), life.required():
        raise VimeError("refused")
    with life.required():
        pass
    alive[0] = False
    with pytest.raises(VimeError, match="engine 0 died"), life.required():
        raise VimeError("engine 0 died\nlast words")
    with pytest.raises(Unavailable, match="an engine ended in check decode: engine 0 died"), life.required():
        pass


@dataclass
class Trainer:
    calls: list[str]

    def offload(self) -> None:
        self.calls.append("offload")

    def onload(self) -> None:
        self.calls.append("onload")


@dataclass
class Shared(Devices):
    """Devices whose engines only keep books."""

    calls: list[str] = field(default_factory=list)

    def sleep(self, level: int) -> None:
        self.is_engine_awake = False
        self.calls.append(f"sleep {level}")

    def wake(self) -> None:
        self.is_engine_awake = True
        self.calls.append("wake")


def test_shared_devices_hold_one_side_at_a_time() -> None:
    calls: list[str] = []
    devices = Shared(True, Trainer(calls), SimpleNamespace(), calls=calls)
    devices.to_trainer()
    devices.to_trainer()
    assert calls == ["sleep 1"]
    devices.to_engines()
    devices.to_engines()
    assert calls == ["sleep 1", "offload", "wake"]
    devices.to_both()
    assert calls[3:] == ["onload"]
    devices.to_trainer()
    assert calls[4:] == ["sleep 1"]


def test_devices_of_their_own_are_left_alone() -> None:
    calls: list[str] = []
    devices = Shared(False, Trainer(calls), SimpleNamespace(), calls=calls)
    devices.to_trainer()
    devices.to_engines()
    devices.to_both()
    assert calls == []
    devices.sleep(2)
    devices.to_trainer()
    devices.to_engines()
    assert calls == ["sleep 2", "wake"]


def test_a_sync_is_said_where_it_tells_something() -> None:
    """The first one, and each that leaves another number of tensors different than the one before."""
    said: list[str] = []
    progress = SimpleNamespace(note=said.append)
    bench = LiveBench(
        SimpleNamespace(config=None), Path("none"), SimpleNamespace(progress=progress, phase=nothing), ExitStack()
    )
    bench._facts = {"the way of the weights": Transport([0, 0, 2, 2, 0]), "the start of the trainer": Side()}
    bench._facts |= {"the start of the engines": Side()}
    bench.__dict__["devices"] = Shared(False, Trainer([]), SimpleNamespace())
    for _ in range(5):
        bench.sync()
    assert said == ["sync 0, 0 differ", "sync 2, 2 differ", "sync 4, 0 differ"]


def nothing(_: str = "") -> nullcontext[None]:
    return nullcontext()


@dataclass
class Side:
    """A side that is alive."""

    num_steps: int = 0
    life: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(required=nothing))


@dataclass
class Transport:
    """Reports as the real one, with so many different tensors at each sync."""

    wrong: list[int]
    report: Callable[[str], None] = print
    num: int = 0

    def sync(self, version: int) -> WeightManifest:
        wrong = self.wrong[self.num]
        self.report(f"sync {self.num}, {wrong} differ")
        self.num += 1
        return WeightManifest(version, "trainer", {}, verification=Verification(version, "full", 9, 9, 9 - wrong, 0, 0))
