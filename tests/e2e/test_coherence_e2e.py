"""`vime rollout` judges its answers: a planted fault ends in exit code 1 and its cause, a clean model in PASS."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Command, vime

ROTARY = "model.layers.0.self_attn.rotary_emb.cos_sin_cache"
RUN = """
[run]
name = "judged"
[model]
path = "{model}"
[data]
prompts = ["prompts.jsonl"]
[rollout]
rollout_batch_size = 4
num_samples_per_prompt = 4
sampling = {{ max_response_len = 4 }}
[vllm]
kv_cache_memory_bytes = 33554432
"""


@pytest.fixture(scope="module")
def adder(tmp_path_factory: pytest.TempPathFactory, trained_model: Path) -> Path:
    """A folder with a run of the trained tiny model."""
    folder = tmp_path_factory.mktemp("judged")
    rows = [json.dumps({"prompt": f"{a}+{b}=", "label": str(a + b)}) + "\n" for a in range(5) for b in range(4)]
    (folder / "prompts.jsonl").write_text("".join(rows))
    (folder / "run.toml").write_text(RUN.format(model=trained_model))
    return folder


def rollout(folder: Path, name: str, *arguments: object) -> Command:
    template = folder / name / "data_{rollout_id}.pt"
    (folder / name).mkdir()
    return vime("rollout", folder / "run.toml", f"run.dir={folder / name / 'run'}", "--save", template, *arguments)


@pytest.mark.slow
def test_a_lost_rotary_cache_fails_the_rollout_and_is_named(adder: Path) -> None:
    command = rollout(adder, "rotary", "--inject", "zero-rotary", "--json")
    assert command.process.returncode == 1, command.text
    assert f"warning: engine 0: PLANTED FAULT zero-rotary (debug.inject): {ROTARY}: all zero" in command.text
    assert "warning: coherence of rollout 0: GARBLED" in command.text
    assert f"  likely: released buffers: {ROTARY} is not what it was when the engine started" in command.lines
    assert "error: check failed: coherence: GARBLED: mean |engine - Hugging Face| is " in command.text
    assert command.text.count("    sample ") == 3
    text = command.text[command.text.index("\n{\n") :]
    (found,) = json.loads(text[: text.rindex("\n}") + 2])["coherence"]
    assert (found["verdict"], found["rollout_id"]) == ("GARBLED", 0)
    assert found["cause"].startswith(f"released buffers: {ROTARY} is not what it was")


@pytest.mark.slow
def test_a_base_model_is_suspected_and_its_copy_is_gone(adder: Path) -> None:
    command = rollout(adder, "base", "--inject", "base-model")
    assert command.process.returncode == 0, command.text
    assert "coherence of rollout 0: SUSPECT" in command.text
    assert "  likely: pretrained model: its chat markers were never trained; the engine agrees" in command.text
    assert not [path for path in (adder / "base" / "run").iterdir() if path.name.startswith(".base-model")]
