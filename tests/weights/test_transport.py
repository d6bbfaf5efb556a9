"""The transport against engines of our own protocol that misbehave; the real engine is in tests/backends_vllm."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace

import pytest
import torch

from vime.errors import UsageError, VimeError
from vime.types import TensorEntry, WeightManifest
from vime.weights.manifest import build_manifest, compare
from vime.weights.shm import BufferPlan, SharedBuffer, WritePlan, write_weights
from vime.weights.transport import ShmTransport

TENSORS = {f"model.layers.{i}.w": torch.full((3, 2), float(i)) for i in range(3)} | {"norm": torch.ones(4)}
SPECS = [TensorEntry(n, tuple(t.shape), "float32") for n, t in TENSORS.items()]


class FakeEngine:
    """Reads the file as a real engine does; ``wrong`` changes what it then holds."""

    def __init__(
        self, name: str = "engine 0", specs: list[TensorEntry] = SPECS, wrong=None, delay: float = 0.0
    ) -> None:
        self.name, self.specs, self.wrong, self.delay = name, specs, wrong or (lambda held: held), delay
        self.calls: list[int] = []

    async def weight_specs(self) -> list[TensorEntry]:
        return self.specs

    async def update_weights(self, version, path, tensors, verify, names=None):
        self.calls.append(version)
        await asyncio.sleep(self.delay)
        entries = [e for e, _ in tensors]
        self.digests = [entry.digest for entry in entries]
        buffer = SharedBuffer.attach(path, BufferPlan.of(entries).num_bytes)
        got = {e.name: buffer.view(e, o).clone() for e, o in tensors}
        buffer.close()
        received = build_manifest(version, "engine-received", got.items())
        held = build_manifest(version, "engine-held", self.wrong(got).items())
        return received, held if verify == "full" else None


def write(plan: WritePlan) -> WeightManifest:
    return write_weights(plan, TENSORS.items())


def test_sync_reaches_every_engine_and_says_so() -> None:
    engines = [FakeEngine("engine 0"), FakeEngine("engine 1")]
    said: list[str] = []
    transport = ShmTransport(write, SPECS, engines, "full", 20, said.append)
    manifest = transport.sync(3)
    assert manifest.version == 3
    assert [e.calls for e in engines] == [[3], [3]]
    assert "weights v3: 4 tensors, 0.0 MB, received = trainer 4/4, held = trainer 4/4, " in said[0]
    path = transport._buffer.path
    transport.sync(4)
    assert transport._buffer.path == path  # one file for the whole run
    transport.close()
    assert not os.path.exists(path)


def test_received_only_asks_for_no_more() -> None:
    said: list[str] = []
    transport = ShmTransport(write, SPECS, [FakeEngine(wrong=lambda held: {})], "received", 20, said.append)
    transport.sync(1)
    assert "received = trainer 4/4" in said[0]
    assert "held" not in said[0]
    transport.close()


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (SPECS[:-1], "unexpected: norm: in the trainer, not in engine 1"),
        ([*SPECS, TensorEntry("model.layers.3.w", (3, 2), "float32")], r"missing: model\.layers\.3\.w"),
        ([*SPECS[:-1], TensorEntry("norm", (5,), "float32")], r"shape: norm: \[5\] in engine 1, \[4\] in the trainer"),
        ([*SPECS[:-1], TensorEntry("norm", (4,), "bfloat16")], "dtype: norm: bfloat16 in engine 1, float32 in the"),
    ],
)
def test_unequal_sets_are_refused_before_anything_is_written(specs, message: str) -> None:
    written = []
    engines = [FakeEngine("engine 0"), FakeEngine("engine 1", specs)]
    transport = ShmTransport(lambda plan: written.append(plan), SPECS, engines, "full", 20)
    with pytest.raises(UsageError, match=message):
        transport.sync(1)
    assert written == []
    assert engines[0].calls == []


def test_an_engine_that_holds_something_else_is_named() -> None:
    def swapped(held):
        return held | {"model.layers.2.w": held["model.layers.0.w"], "norm": held["norm"] * 2}

    transport = ShmTransport(write, SPECS, [FakeEngine("engine 0"), FakeEngine("engine 1", wrong=swapped)], "full", 20)
    with pytest.raises(VimeError) as error:
        transport.sync(1)
    assert "engine 1 held: permuted: layer 2: in engine-held, layer 2 holds layer 0's tensors" in str(error.value)
    assert "engine 1 held: value: norm" in str(error.value)
    assert "engine 0" not in str(error.value)


def test_what_an_engine_cannot_read_back_is_said() -> None:
    class Blind(FakeEngine):
        async def update_weights(self, version, path, tensors, verify, names=None):
            received, held = await super().update_weights(version, path, tensors, verify, names)
            held.tensors["norm"] = replace(held.tensors["norm"], digest="")
            return received, held

    said: list[str] = []
    transport = ShmTransport(write, SPECS, [Blind()], "full", 20, said.append)
    transport.sync(1)
    assert "(1 of what is held NOT TESTED, first norm)" in said[0]
    transport.close()


def test_who_compares_himself_gets_what_every_engine_answered() -> None:
    """Not strict: entries have no digest an engine could refuse, and it goes on with what it holds."""
    engine = FakeEngine(wrong=lambda held: held | {"norm": held["norm"] * 2})
    said: list[str] = []
    transport = ShmTransport(write, SPECS, [engine], "full", 20, said.append, is_strict=False)
    sent = transport.sync(1)
    received, held = transport.answers["engine 0"]
    assert compare(sent, received) == []
    assert [str(d)[:11] for d in compare(sent, held)] == ["value: norm"]
    assert "held = trainer 3/4" in said[0]
    assert all(entry.digest for entry in sent.tensors.values())
    assert engine.digests == [""] * 4
    transport.close()


def test_a_late_engine_and_a_late_writer_are_named() -> None:
    slow = ShmTransport(write, SPECS, [FakeEngine("engine 0"), FakeEngine("engine 1", delay=30)], "full", 2)
    with pytest.raises(VimeError, match=r"engine 1 did not end updating the weights within 2 s"):
        slow.sync(1)

    def late(plan: WritePlan) -> WeightManifest:
        time.sleep(2)
        return write(plan)

    stuck = ShmTransport(late, SPECS, [FakeEngine()], "full", 0.2)
    with pytest.raises(VimeError, match=r"the trainer did not end writing the weights within 0\.2 s"):
        stuck.sync(1)
    assert not [f for f in os.listdir("/dev/shm") if f.startswith(f"vime-run-weights-{os.getpid()}-")]


def test_the_writers_error_is_the_one_that_is_seen() -> None:
    def broken(plan: WritePlan) -> WeightManifest:
        return write_weights(plan, list(TENSORS.items())[:2])

    engine = FakeEngine()
    with pytest.raises(VimeError, match="end after 2 tensors"):
        ShmTransport(broken, SPECS, [engine], "full", 20).sync(1)
    assert engine.calls == []


def test_digests_travel_with_the_tensors() -> None:
    seen = []

    class Looking(FakeEngine):
        async def update_weights(self, version, path, tensors, verify, names=None):
            seen.extend(e.digest for e, _ in tensors)
            return await super().update_weights(version, path, tensors, verify, names)

    transport = ShmTransport(write, SPECS, [Looking()], "full", 20)
    sent = transport.sync(1)
    assert seen == [e.digest for e in sent.tensors.values()]
    assert all(seen)
    assert replace(sent, version=2) != sent
    transport.close()


class Asked(FakeEngine):
    """Digests only what it is asked for, as a real engine does."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.asked: list[tuple[str, tuple[str, ...] | None]] = []

    async def update_weights(self, version, path, tensors, verify, names=None):
        self.asked.append((verify, None if names is None else tuple(names)))
        received, held = await super().update_weights(version, path, tensors, verify, names)
        return self._only(received, names), held and self._only(held, names)

    def _only(self, manifest: WeightManifest, names) -> WeightManifest:
        kept = {
            n: t if names is None or n in names else replace(t, digest="", l2=0.0) for n, t in manifest.tensors.items()
        }
        return replace(manifest, tensors=kept, seconds=0.25)


MANY = {f"model.layers.{i}.w": torch.full((2, 2), float(i)) for i in range(23)}
MANY_SPECS = [TensorEntry(n, tuple(t.shape), "float32") for n, t in MANY.items()]


def syncs(verify: str, count: int, wrong=None) -> tuple[Asked, list[str], list[WeightManifest]]:
    engine, said = Asked(specs=MANY_SPECS, wrong=wrong), []
    transport = ShmTransport(
        lambda plan: write_weights(plan, MANY.items()), MANY_SPECS, [engine], verify, 20, said.append
    )
    try:
        return engine, said, [transport.sync(version) for version in range(count)]
    finally:
        transport.close()


def test_sampled_is_full_first_then_a_tenth_in_turn_until_all_are_covered() -> None:
    engine, said, manifests = syncs("sampled", 21)
    assert engine.asked[0] == ("full", None)
    assert {verify for verify, _ in engine.asked} == {"full"}
    for round_ in (engine.asked[1:11], engine.asked[11:21]):
        seen = [name for _, names in round_ for name in names]
        assert sorted(seen) == sorted(MANY)  # each of them once
        assert {len(names) for _, names in round_} == {2, 3}
    assert "received = trainer 23/23, held = trainer 23/23, " in said[0]
    assert "received = trainer 3/3 (of 23), held = trainer 3/3 (of 23), " in said[1]
    assert "verified in 0." in said[1]
    facts = manifests[1].verification
    assert (facts.version, facts.level, facts.num_tensors, facts.num_compared, facts.num_equal) == (
        1,
        "sampled",
        23,
        3,
        3,
    )
    assert facts.seconds >= 0.5  # received and held, 0.25 each, and the trainer's
    assert all(t.digest for t in manifests[1].tensors.values())  # the record names all of the weights


def test_sampled_finds_a_wrong_tensor_when_its_turn_comes() -> None:
    def wrong(held):
        return held | {"model.layers.4.w": torch.zeros(2, 2)} if wrong.is_planted else held

    wrong.is_planted = False
    engine = Asked(specs=MANY_SPECS, wrong=wrong)
    transport = ShmTransport(lambda plan: write_weights(plan, MANY.items()), MANY_SPECS, [engine], "sampled", 20)
    transport.sync(0)
    wrong.is_planted = True
    for version in range(1, 5):
        transport.sync(version)
    with pytest.raises(VimeError, match="held: permuted: layer 4"):
        transport.sync(5)  # layers 4 and 14 and so on
    transport.close()


def test_off_digests_nothing_and_says_so() -> None:
    engine, said, (manifest,) = syncs("off", 1)
    assert engine.asked == [("received", ())]
    assert "weights v0: 23 tensors, 0.0 MB, not compared, " in said[0]
    assert "verified" not in said[0]
    assert not any(t.digest for t in manifest.tensors.values())
    assert manifest.verification.num_compared == 0


def test_received_never_reads_back() -> None:
    engine, said, _ = syncs("received", 2, wrong=lambda held: {})
    assert engine.asked == [("received", None)] * 2
    assert all("received = trainer 23/23, " in line for line in said)
