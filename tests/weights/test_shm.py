from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from vime.errors import VimeError
from vime.types import TensorEntry
from vime.weights.manifest import build_manifest, digest
from vime.weights.shm import ALIGNMENT, BufferPlan, SharedBuffer, WritePlan, num_bytes, write_weights

TENSORS = {
    "a": torch.arange(5, dtype=torch.float32),
    "b": torch.arange(6, dtype=torch.float32).view(2, 3).bfloat16(),
    "c": torch.tensor([[1.5]], dtype=torch.float64),
    "empty": torch.empty(0, 4),
}
ENTRIES = [TensorEntry(n, tuple(t.shape), str(t.dtype)[6:]) for n, t in TENSORS.items()]


@pytest.fixture
def buffer():
    buffer = SharedBuffer.create(BufferPlan.of(ENTRIES).num_bytes)
    yield buffer
    buffer.close()
    buffer.unlink()


def test_plan_is_aligned_and_does_not_overlap() -> None:
    plan = BufferPlan.of(ENTRIES)
    assert [num_bytes(e) for e in ENTRIES] == [20, 12, 8, 0]
    assert plan.offsets == (0, 64, 128, 192)
    assert plan.num_bytes == 192
    assert all(offset % ALIGNMENT == 0 for offset in plan.offsets)


def test_write_gives_digests_of_what_lies_in_the_file(buffer) -> None:
    plan = BufferPlan.of(ENTRIES)
    strided = {**TENSORS, "b": TENSORS["b"].t().contiguous().t()}
    manifest = write_weights(WritePlan(plan, buffer.path, 7), strided.items())
    assert (manifest.version, manifest.origin) == (7, "trainer")
    for entry, view in buffer.views(plan):
        assert torch.equal(view, TENSORS[entry.name])
        assert manifest.tensors[entry.name].digest == digest(TENSORS[entry.name])
    del view


def test_another_process_sees_the_bytes(buffer) -> None:
    plan = BufferPlan.of(ENTRIES)
    buffer.write(plan, TENSORS.items(), 1)
    code = (
        "import sys; from vime.weights.shm import SharedBuffer; from vime.types import TensorEntry\n"
        "b = SharedBuffer.attach(sys.argv[1], 192)\n"
        "print(b.view(TensorEntry('b', (2, 3), 'bfloat16'), 64).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code, buffer.path], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(TENSORS["b"].tolist()), done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("b"), "planned .*'b'"),
        (lambda t: t.update(a=t["a"].double()), "float64"),
        (lambda t: t.update(a=torch.zeros(6)), r"\(6,\)"),
        (lambda t: t.pop("empty"), "end after 3 tensors, before empty"),
        (lambda t: t.update(extra=torch.ones(1)), "go on after the 4 planned tensors with extra"),
    ],
)
def test_wrong_streams_are_refused(buffer, change, message: str) -> None:
    tensors = dict(TENSORS)
    change(tensors)
    with pytest.raises(VimeError, match=message):
        buffer.write(BufferPlan.of(ENTRIES), tensors.items(), 1)


def test_no_room_is_an_error_and_leaves_no_file(tmp_path) -> None:
    free = os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(VimeError, match="MB free, the weights need"):
        SharedBuffer.create(free + (1 << 30))
    assert set(os.listdir("/dev/shm")) == before
    with pytest.raises(VimeError, match="does not exist"):
        SharedBuffer.attach(str(tmp_path / "none"), 64)
    (tmp_path / "short").write_bytes(b"x" * 10)
    with pytest.raises(VimeError, match="10 bytes, expected 64"):
        SharedBuffer.attach(str(tmp_path / "short"), 64)


def test_memory_that_cannot_be_had_leaves_no_file(monkeypatch, tmp_path) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(VimeError, match="cannot be had: No space left on device"):
        SharedBuffer.create(64, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_file_is_private_and_unlinked(buffer) -> None:
    assert os.stat(buffer.path).st_mode & 0o777 == 0o600
    buffer.write(BufferPlan.of(ENTRIES), TENSORS.items(), 1)
    buffer.close()
    buffer.unlink()
    assert not os.path.exists(buffer.path)


def test_digests_equal_a_manifest_of_the_same_tensors(buffer) -> None:
    written = buffer.write(BufferPlan.of(ENTRIES), TENSORS.items(), 1).tensors
    built = build_manifest(1, "trainer", TENSORS.items()).tensors
    assert {n: e.digest for n, e in written.items()} == {n: e.digest for n, e in built.items()}
