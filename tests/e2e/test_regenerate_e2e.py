"""`vime replay --regenerate`: what a training run recorded, asked again of live engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Command, vime


def regenerate(workspace: Path, *arguments: object) -> Command:
    load = ("--load", workspace / "records/data_{rollout_id}.pt")
    return vime("replay", workspace / "run.toml", "--regenerate", *load, *arguments)


def result_of(command: Command) -> dict:
    """The JSON among the lines of talk."""
    start = command.lines.index("{")
    return json.loads("\n".join(command.lines[start : command.lines.index("}") + 1]))


@pytest.mark.slow
def test_the_first_rollout_of_a_run_comes_again_bit_by_bit(workspace, uninterrupted):
    """Weights v0 are those of model.path: the digest of the sync equals that of what the engine holds."""
    command = regenerate(workspace, "--ids", "0", "--json")
    assert command.process.returncode == 0, command.text
    result = result_of(command)
    assert result["check"]["verdict"] == "PASS"
    assert (result["num_samples"], result["num_identical"]) == (16, 16)
    assert result["num_matching_tokens"] == result["num_tokens"] > 16
    assert (result["max_log_prob_gap"], result["departures"], result["known_differences"]) == (0.0, [], [])
    assert "weights: the engine holds those of the record (v0, " in command.text
    assert not (workspace / "runs").exists()  # nothing is written


@pytest.mark.slow
def test_a_later_rollout_had_other_weights(workspace, uninterrupted):
    command = regenerate(workspace, "--ids", "3")
    assert command.process.returncode == 1, command.text
    assert "was sampled with weights v3: does model.path hold an export of them?" in command.text
    assert "FAIL  generated again == recorded" in command.text
    assert "the record's weights v3 are " in command.text
    assert "model.path=RUN_DIR/hf" in command.text
    assert "first departures, with log-probs" in command.text
    assert "token at " in command.text


def test_what_cannot_be_asked_again_is_said_before_anything_starts(workspace):
    (workspace / "records").mkdir(exist_ok=True)
    missing = regenerate(workspace, "--ids", "99")
    assert missing.process.returncode == 2, missing.text
    assert "error: " in missing.text
    assert "data_{rollout_id}.pt" in missing.text
    nothing = vime("replay", workspace / "run.toml", "--regenerate")
    assert nothing.process.returncode == 2
    assert "--regenerate needs saved rollouts" in nothing.text
    mixed = regenerate(workspace, "--repeat", "2")
    assert mixed.process.returncode == 2
    assert "--regenerate trains nothing: it does not go with --repeat" in mixed.text
