"""One tiny model, one uninterrupted run and one record for all end-to-end tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from commands import Command, vime

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.tiny.make_model import make_tiny_model

RUN = """
[run]
name = "e2e"
num_rollouts = 4
[model]
path = "{model}"
[data]
prompts = ["prompts.jsonl"]
[rollout]
rollout_batch_size = 4
num_samples_per_prompt = 4
[rollout.sampling]
max_response_len = 8
[reward]
name = "format"
pattern = '[A-Za-z].*'
[train]
lr = 1e-3
[vllm]
kv_cache_memory_bytes = 33554432
"""


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with run.toml, prompts and a random model: the reward asks only for a letter at the start."""
    folder = tmp_path_factory.mktemp("e2e")
    model = make_tiny_model(folder / "model", steps=0)
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(5) for b in range(2)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text(RUN.format(model=model))
    return folder


@pytest.fixture(scope="session")
def uninterrupted(workspace: Path) -> tuple[Command, Path]:
    """(command, run folder) of four rollouts in one go, exported and recorded."""
    run_dir = workspace / "uninterrupted"
    record = workspace / "records" / "data_{rollout_id}.pt"
    command = vime(
        "train",
        workspace / "run.toml",
        f"run.dir={run_dir}",
        "checkpoint.save_interval=1",
        "checkpoint.export_hf=true",
        f'eval.prompts=["{workspace / "prompts.jsonl"}"]',
        "--save-debug-rollout-data",
        record,
    )
    assert command.process.returncode == 0, command.text
    return command, run_dir
