"""`vime align-check --bisect`: a planted fault is located in the real engine; the trainer against Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from commands import vime

from vime.record import write
from vime.types import RolloutBatch, Sample


def compare(folder: Path, name: str, *arguments: object):
    return vime("align-check", folder / "run.toml", "--bisect", f"run.dir={folder / name}", *arguments)


@pytest.mark.slow
def test_a_lost_rotary_cache_is_located_between_engine_and_trainer(workspace: Path) -> None:
    command = compare(workspace, "located", "--size", "1x2x6", "--inject", "zero-rotary")
    assert command.process.returncode == 1, command.text
    found = "engine against trainer: first above tolerance 0.0001: layers.0.attn_out (layer 0, attention: rotary, q.k"
    assert f"FAIL: {found}" in command.text
    assert "PLANTED FAULT zero-rotary" in command.text
    assert "before it layers.0.v agrees: 0" in command.text
    assert "weight model.layers.0.self_attn.o_proj.weight: equal on both sides" in command.lines
    assert any(line.startswith("likely: the weights have equal digests: the rotary cache") for line in command.lines)
    report = json.loads((workspace / "located" / "report.json").read_text())
    (check,) = report["checks"]
    assert check["numbers"]["first"] == "layers.0.attn_out"
    assert [row[0] for row in check["numbers"]["layers"][-2:]] == ["final_norm", "log_prob"]
    assert "from layer to layer" in (workspace / "located" / "report.html").read_text()


@pytest.mark.slow
def test_recorded_tokens_through_trainer_and_hugging_face_need_no_engine(workspace: Path) -> None:
    ids = np.array([1, 20, 30, 40, 50, 60])
    sample = Sample(0, 0, ids, 2, np.arange(6) >= 2, np.full(6, -4.0) * (np.arange(6) >= 2))
    record = workspace / "six_tokens.pt"
    write(record, RolloutBatch.from_samples(0, [sample]))
    command = compare(workspace, "right", "--of", "trainer", "--against", "hf", "--from-record", record, "--json")
    assert command.process.returncode == 0, command.text
    assert "vLLM" not in command.text
    text = command.text[command.text.index("\n{\n") :]
    (check,) = json.loads(text[: text.rindex("\n}") + 2])["checks"]
    assert check["verdict"] == "PASS"
    assert check["numbers"]["first"] is None
    assert check["numbers"]["largest"][1] < 1e-5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--bisect", "--of", "vllm"], "--of vllm: is no side"),
        (["--bisect", "--of", "hf", "--against", "hf"], "--of hf --against hf: are one side"),
        (["--sample", "0/0"], "--sample 0/0: belongs to --bisect"),
    ],
)
def test_wrong_usage_starts_nothing(workspace: Path, arguments: list[str], said: str) -> None:
    command = vime("align-check", workspace / "run.toml", *arguments)
    assert command.process.returncode == 2
    assert said in command.text
