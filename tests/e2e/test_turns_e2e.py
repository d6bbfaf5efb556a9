"""Several turns with the real engine and the real trainer: both see the same tokens. A signal ends the run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from commands import Command

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


@pytest.fixture(scope="module")
def interrupted(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Command, Path]:
    """(command, folder) of a run that was told to end in its third rollout."""
    folder = tmp_path_factory.mktemp("turns")
    (folder / "two_turns.py").write_text(GENERATE)
    arguments = ["train", workspace / "run.toml", "run.num_rollouts=5000", f"run.dir={folder / 'run'}"]
    arguments += ["rollout.generate=two_turns:generate", "--save-debug-rollout-data", folder / "data_{rollout_id}.pt"]
    command = Command(arguments, {"PYTHONPATH": str(folder)})
    command.wait_for_line("^rollout 1/")
    os.killpg(command.process.pid, signal.SIGTERM)
    command.finish(60)
    return command, folder


@pytest.mark.slow
def test_a_signal_to_end_leaves_nothing(interrupted: tuple[Command, Path]) -> None:
    command, _ = interrupted
    assert command.process.returncode == 130
    assert command.lines[-1] == "interrupted"
    assert command.left_behind() == []


@pytest.mark.slow
def test_tool_tokens_are_seen_and_not_trained_on(interrupted: tuple[Command, Path]) -> None:
    from vime.record import read

    command, folder = interrupted
    assert "PASS  engine log_probs == trainer log_probs" in command.text
    row = next(r for r in read_jsonl(folder / "run/metrics.jsonl") if "train/loss" in r)
    assert row["train/train_rollout_logprob_abs_diff"] < 1e-5
    batch = read(folder / "data_0.pt")
    for sample in batch.samples():
        response = sample.loss_mask[sample.prompt_len :]
        assert sample.metadata["num_turns"] == 1 + sample.index % 2
        assert response.all() == (sample.index % 2 == 0)
        assert response[-1]
        assert not sample.rollout_log_probs[~sample.loss_mask].any()
    assert sum(not s.loss_mask[s.prompt_len :].all() for s in batch.samples()) == 8
