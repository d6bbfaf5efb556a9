"""Check 2 says where wrong values come from, by the tensors themselves (cases W07, W23)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from fake_bench import FakeBench, config
from safetensors.torch import save_file

from vime.align.checks.names import run
from vime.align.export_faults import EXPORT_FAULTS
from vime.align.value_causes import value_causes
from vime.models import load_spec
from vime.types import Verdict
from vime.weights.manifest import build_manifest
from vime.weights.shards import written

CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 32,
    "vocab_size": 24,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with random weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(0)
    shapes = load_spec(tmp_path).tensors()
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@dataclass
class Exporting:
    """A trainer that exports these tensors."""

    tensors: dict[str, torch.Tensor]

    def manifest(self):
        return build_manifest(0, "trainer", self.tensors.items())

    def write_tensors(self, of: str, folder: Path, version: int):
        return build_manifest(version, of, written(folder, self.tensors.items()))


def bench_of(folder: Path, tensors: dict[str, torch.Tensor]) -> FakeBench:
    from safetensors.torch import load_file

    own = load_file(folder / "model.safetensors")
    return FakeBench(
        config=config(model={"path": str(folder), "dtype": "float32"}),
        spec=load_spec(folder),
        checkpoint=build_manifest(0, "checkpoint", own.items()),
        trainer=Exporting(tensors),
        folder=folder,
    )


def exported(folder: Path, fault: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return dict(EXPORT_FAULTS[fault].apply(load_spec(folder), load_file(folder / "model.safetensors").items()))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("joined-shards", "tp = 2"),
        ("transposed", "transposed (square)"),
        ("swapped-qk", "rows"),
    ],
)
def test_the_cause_of_a_planted_fault_is_named(folder: Path, fault: str, said: str) -> None:
    result = run(bench_of(folder, exported(folder, fault)))
    assert result.verdict == Verdict.FAIL
    assert said in result.cause, result.cause
    assert any(said in line for line in result.evidence)
    assert [path.name for path in folder.iterdir() if path.is_dir()] == []  # nothing is left behind


def test_a_value_of_its_own_has_no_other_cause(folder: Path) -> None:
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    name = "model.norm.weight"
    tensors[name] = tensors[name] + 1
    result = run(bench_of(folder, tensors))
    assert result.cause.startswith(f"{name}: max |difference| 1")


def test_equal_folders_have_no_causes(folder: Path) -> None:
    assert value_causes(folder, folder, "float32", ["model.norm.weight"]) == []
