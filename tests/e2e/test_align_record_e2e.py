"""`vime align-check --from-record`: what can be told of a recorded rollout by the trainer alone, without vLLM."""

from __future__ import annotations

import json

import pytest
from commands import vime
from test_replay_e2e import without

from vime.align.answer_faults import damaged
from vime.record import read, write


def check(workspace, folder, template, *more, **environment):
    return vime(
        "align-check",
        workspace / "run.toml",
        f"run.dir={folder / 'walk'}",
        "--from-record",
        template,
        "--only",
        "8",
        *more,
        **environment,
    )


def verdicts(folder):
    report = json.loads((folder / "walk" / "report.json").read_text())
    return {one["name"]: one["verdict"] for one in report["checks"]}


@pytest.mark.slow
def test_a_record_is_checked_without_an_engine(workspace, tmp_path, uninterrupted):
    template = workspace / "records" / "data_{rollout_id}.pt"
    command = check(workspace, tmp_path, template, PYTHONPATH=without("vllm", tmp_path))
    assert command.process.returncode == 0, command.text
    assert verdicts(tmp_path) == {
        **dict.fromkeys(["sampling", "tokens", "packing", "shapes", "engine"], "PASS"),
        **dict.fromkeys(["decode", "batch", "prefix_cache", "order", "head", "routing"], "SKIP"),
    }
    assert "rollout 0 of" in command.text


@pytest.mark.slow
def test_one_sample_with_the_log_probs_of_another_is_a_finding(workspace, tmp_path, uninterrupted):
    """A23"""
    batch, _ = damaged(read(workspace / "records" / "data_0.pt"), "exchanged-log-probs")
    write(tmp_path / "data_0.pt", batch)
    command = check(workspace, tmp_path, tmp_path / "data_{rollout_id}.pt", "--size", "4x4x8")
    assert command.process.returncode == 1, command.text
    assert "(1 finding: tokens)" in command.text
    assert "samples have the log-probs of others" in command.text


def test_a_record_that_is_not_there_ends_it_before_anything_starts(workspace, tmp_path, uninterrupted):
    command = check(workspace, tmp_path, workspace / "records" / "data_{rollout_id}.pt", "--ids", "9")
    assert command.process.returncode == 2, command.text
    assert "9" in command.lines[-1] or "9" in command.lines[-2]
