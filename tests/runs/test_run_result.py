"""The closing tables of a run, and the same as JSON."""

import io
import json
import sys

import pytest
from fakes import sample

from vime.rollout.summary import RolloutSummary
from vime.runs.result import RunResult
from vime.types import RolloutBatch
from vime_cli import output


def result_of(tmp_path, **changes):
    nothing = {"start": 0, "rewards": [], "evaluations": {}, "examples": [], "checks": []}
    return RunResult("rollout", tmp_path, **{**nothing, **changes})


def summary_of(*rollouts):
    summary = RolloutSummary()
    for rollout_id, rewards in enumerate(rollouts):
        samples = [sample(0, i, reward=reward) for i, reward in enumerate(rewards)]
        summary.add(RolloutBatch.from_samples(rollout_id, samples), 1.0)
    return summary


def numbers(reward, **more):
    return {"reward": reward, "best_reward": reward, "num_samples": 4, **more}


def test_one_row_per_evaluation_set(tmp_path):
    plain = {0: numbers(0.1, pass_at_1=0.1), 2: numbers(0.2), 4: numbers(0.75, pass_at_1=0.75)}
    hard = {0: numbers(0.5, pass_at_1=0.5, pass_at_2=0.625, pass_at_4=1.0) | {"dropped/aborted": 2}}
    result = result_of(tmp_path, evaluations={"eval": plain, "hard": hard})
    assert result.rows() == [
        ("evaluation", "0.100 (weights v0) -> 0.750 (weights v4)"),
        (
            "evaluation of hard",
            "0.500 (weights v0); pass@1 0.500, pass@2 0.625, pass@4 1.000; prompts left out: aborted 2",
        ),
    ]
    assert result.as_dict()["evaluations"]["hard"][0]["pass_at_4"] == 1.0


def test_generation_alone_has_statistics_in_place_of_a_course(tmp_path, capsys):
    rewards = [[0.0, 1.0, 1.0, 1.0], [1.0] * 4]
    result = result_of(tmp_path, rewards=[0.75, 1.0], summary=summary_of(*rewards))
    assert result.rows() == []
    output.result(result, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines if line.startswith(("  0 ", "  1 "))] == [
        ["0", "4", "0.750"], ["1", "4", "1.000"], ["0", "1", "12%"], ["1", "7", "88%"],
    ]  # fmt: skip
    bars = [line.count("\N{FULL BLOCK}") for line in lines if "\N{FULL BLOCK}" in line]
    assert bars == [5, 35]
    assert any(line.split() == ["samples", "8", "in", "2", "groups,", "2", "rollouts"] for line in lines)
    output.result(result, as_json=True)
    found = json.loads(capsys.readouterr().out)["statistics"]
    assert found["total"]["histogram"] == [
        {"low": 0.0, "high": 0.0, "count": 1}, {"low": 1.0, "high": 1.0, "count": 7},
    ]  # fmt: skip
    assert [r["reward"]["mean"] for r in found["rollouts"]] == [0.75, 1.0]


def test_of_many_rollouts_the_last_are_shown(tmp_path, capsys):
    output.result(result_of(tmp_path, summary=summary_of(*[[1.0]] * 20)), as_json=False)
    out = capsys.readouterr().out
    assert "rollouts, the last 16 of 20 (all: --json)" in out
    shown = [line.split()[0] for line in out.splitlines() if "1.000" in line and "mean" not in line]
    assert shown == [str(i) for i in range(4, 20)]


def test_one_rollout_without_rewards_has_neither_table_nor_bars(tmp_path, capsys):
    output.result(result_of(tmp_path, summary=summary_of([None])), as_json=False)
    out = capsys.readouterr().out
    assert "none: no sample has a reward" in out
    assert "no spread" not in out
    assert "share" not in out


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", "\N{FULL BLOCK}"), ("ascii", "#")])
def test_bars_are_of_what_the_stream_can_take(monkeypatch, encoding, shown):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    found = [output.bar(share) for share in (0.0, 0.001, 0.5, 1.0)]
    assert found == ["", shown, shown * 20, shown * 40]
