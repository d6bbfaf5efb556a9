"""Experts through the whole product: two trainer ranks with half of the experts each, an engine of two ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

from commands import vime

from vime.align.tiny_model import Recipe, make_tiny_model


def test_experts_are_trained_synced_and_exported(workspace: Path, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", Recipe(family="qwen3_moe", steps=0))
    command = vime(
        "train",
        workspace / "run.toml",
        f"model.path={model}",
        f"run.dir={tmp_path / 'run'}",
        "run.num_rollouts=2",
        "parallel.dp=2",
        "parallel.ep=2",
        "rollout.engine_tp=2",
        "weights.verify=full",
        "checkpoint.save_interval=2",
        "checkpoint.export_hf=true",
    )
    assert command.process.returncode == 0, command.text
    text = command.text
    assert "qwen3_moe" in text
    assert "ep 2, etp 1" in text
    for check in ("log_probs == ref_log_probs", "engine log_probs == trainer log_probs"):
        assert set(re.findall(rf"(PASS|WARN|FAIL) +{check}", text)) == {"PASS"}, text
    counts = re.findall(r"weights v\d+: (\d+) tensors, .* received = trainer (\d+)/\1, held = trainer (\d+)/\1", text)
    assert len(counts) == 3
    assert all(total == received == held for total, received, held in counts)
    exported = sorted((tmp_path / "run").rglob("model.safetensors"))
    assert exported, sorted(str(path) for path in (tmp_path / "run").rglob("*"))
    assert json.loads((exported[-1].parent / "config.json").read_text())["model_type"] == "qwen3_moe"
    from safetensors.numpy import load_file

    before, after = load_file(model / "model.safetensors"), load_file(exported[-1])
    assert before.keys() == after.keys()
    assert any((before[name] != after[name]).any() for name in before if ".experts." in name)
