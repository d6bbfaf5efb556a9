from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from vime.errors import UsageError
from vime.weights.checkpoint import SAFETENSORS_DTYPES, read_specs


def test_specs_come_from_the_headers(tmp_path) -> None:
    save_file(
        {"model.layers.1.w": torch.zeros(2, 3, dtype=torch.bfloat16), "lm_head.weight": torch.zeros(4)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    specs = {s.name: (s.shape, s.dtype, s.layer) for s in read_specs(tmp_path)}
    assert specs == {"model.layers.1.w": ((2, 3), "bfloat16", 1), "lm_head.weight": ((4,), "float32", None)}


def test_a_type_that_torch_has_not_is_named(tmp_path) -> None:
    header = json.dumps({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"0")
    with pytest.raises(UsageError, match=r"model\.safetensors: tensor w has the type F4; known: F64"):
        read_specs(tmp_path)


def test_every_known_type_is_one_of_torch() -> None:
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in SAFETENSORS_DTYPES.values())


def test_an_index_counts_and_its_files_must_exist(tmp_path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"stray": torch.zeros(1)}, tmp_path / "stray.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    assert [s.name for s in read_specs(tmp_path)] == ["a"]
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    with pytest.raises(UsageError, match=r"two\.safetensors"):
        read_specs(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"no \*\.safetensors"):
        read_specs(tmp_path)
