"""Several turns with the real engine and the real trainer: both see the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import vime

from vime.metrics import read_jsonl

GENERATE = '''
import asyncio
from vime.rollout.turns import Turns

async def generate(engine, prompt, seeds, sampling):
    return await asyncio.gather(*(solve(engine, prompt, i, seed, sampling) for i, seed in enumerate(seeds)))

async def solve(engine, prompt, index, seed, sampling):
    """Two turns of at most 4 tokens for every second sample, one for the others."""
    turns = Turns(prompt, seed, index, tokenizer=engine.tokenizer, max_response_len=sampling["max_response_len"] + 4)
    await turns.ask(engine, sampling | {"max_response_len": 4})
    if index % 2:
        turns.observe(" 12 ")
        await turns.ask(engine, sampling | {"max_response_len": 4})
    return turns.sample()
'''


@pytest.mark.slow
def test_tool_tokens_are_seen_and_not_trained_on(workspace: Path, tmp_path: Path) -> None:
    from vime.record import read

    (tmp_path / "two_turns.py").write_text(GENERATE)
    command = vime(
        "train",
        workspace / "run.toml",
        "run.num_rollouts=1",
        f"run.dir={tmp_path / 'run'}",
        "rollout.generate=two_turns:generate",
        "--save-debug-rollout-data",
        tmp_path / "data_{rollout_id}.pt",
        PYTHONPATH=str(tmp_path),
    )
    assert command.process.returncode == 0, command.text
    assert "PASS  engine log_probs == trainer log_probs" in command.text
    (row,) = [r for r in read_jsonl(tmp_path / "run/metrics.jsonl") if "train/loss" in r]
    assert row["train/train_rollout_logprob_abs_diff"] < 1e-5
    batch = read(tmp_path / "data_0.pt")
    for sample in batch.samples():
        response = sample.loss_mask[sample.prompt_len :]
        assert sample.metadata["num_turns"] == 1 + sample.index % 2
        assert response.all() == (sample.index % 2 == 0)
        assert response[-1]
        assert not sample.rollout_log_probs[~sample.loss_mask].any()
    assert sum(not s.loss_mask[s.prompt_len :].all() for s in batch.samples()) == 8
