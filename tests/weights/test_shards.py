import pytest
import torch

from vime.errors import VimeError
from vime.weights.manifest import build_manifest
from vime.weights.shards import Shards, written


def tensors(count=5):
    return [(f"t{i}", torch.arange(4, dtype=torch.bfloat16 if i % 2 else torch.float32) + i) for i in range(count)]


def test_what_is_written_is_read_bitwise_in_files_of_bounded_size(tmp_path):
    manifest = build_manifest(3, "trainer", written(tmp_path / "w", iter(tensors()), shard_bytes=30))
    assert sorted(p.name for p in (tmp_path / "w").iterdir()) == [f"{i:05d}.safetensors" for i in range(3)]
    shards = Shards(tmp_path / "w")
    assert sorted(shards.names()) == sorted(manifest.tensors)
    again = build_manifest(3, "trainer", ((name, shards.tensor(name)) for name in shards.names()))
    assert again.tensors == manifest.tensors
    with pytest.raises(KeyError):
        shards.tensor("none")


def test_a_tensor_larger_than_a_file_has_one_of_its_own(tmp_path):
    list(written(tmp_path / "w", tensors(3), shard_bytes=1))
    assert len(list((tmp_path / "w").iterdir())) == 3


def test_a_disk_that_refuses_is_said(tmp_path):
    stream = written(tmp_path / "w", tensors(2))
    next(stream)
    (tmp_path / "w").rmdir()
    with pytest.raises(VimeError, match="could not be written"):
        list(stream)
