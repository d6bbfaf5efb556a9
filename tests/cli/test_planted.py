"""Planted faults before the start: unknown names, and faults that would have no place in the command."""

import json

import pytest
from tiny_run import RUN, make_model

from vime.align.faults import FAULTS
from vime.config.load import read
from vime.preflight import preflight


@pytest.fixture
def found(tmp_path, monkeypatch):
    """(problems, warnings) about debug.inject of a command with settings."""
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    (tmp_path / "run.toml").write_text(RUN)

    def call(command, *faults, settings=()):
        inject = f"debug.inject={json.dumps(faults)}"
        pre = preflight(read([tmp_path / "run.toml"], [inject, *settings]), command, is_dry_run=True)
        return tuple([line for line in lines if "debug.inject" in line] for lines in (pre.problems, pre.warnings))

    return call


ROLLOUT = ("debug.rollout_only=true",)


def test_no_fault_no_line(found):
    assert found("train") == ([], [])


@pytest.mark.parametrize("name", ["nan-weight", "zero-rotary", "wrong-chat-template", "base-model"])
def test_a_planted_fault_is_a_warning(found, name):
    problems, (warning,) = found("rollout", name, settings=ROLLOUT)
    assert problems == []
    assert f"plants the fault {name}: {FAULTS[name].description}" in warning


def test_an_unknown_fault_is_answered_with_the_nearest(found):
    (problem,), warnings = found("rollout", "zero-rotory", settings=ROLLOUT)
    assert "'zero-rotory' is no fault (did you mean zero-rotary?); known: nan-weight, " in problem
    assert warnings == []
    (problem,), _ = found("rollout", "xyz", settings=ROLLOUT)
    assert "did you mean" not in problem


@pytest.mark.parametrize(
    ("command", "name", "settings", "why"),
    [
        ("rollout", "loss-scale", ROLLOUT, "is planted in a trainer rank, and vime rollout starts none"),
        ("train", "nan-weight", (), "would be mended by the first weight sync of vime train; use vime rollout"),
        ("train", "loss-scale", (), "loss-scale needs parallel.dp >= 2"),
        ("rollout", "wrong-chat-template", (*ROLLOUT, "data.apply_chat_template=false"), "no prompt is rendered"),
        ("rollout", "base-model", (*ROLLOUT, "data.apply_chat_template=false"), "no prompt has a marker"),
        ("rollout", "nan-weight", (*ROLLOUT, 'rollout.engines=["http://h:1"]'), "names somebody else's"),
        ("replay", "nan-weight", ("debug.load_rollout_data=d_{rollout_id}.pt",), "vime replay starts none"),
        ("replay", "wrong-chat-template", ("debug.load_rollout_data=d_{rollout_id}.pt",), "vime replay reads none"),
    ],
)
def test_a_fault_without_a_place_is_a_problem(found, command, name, settings, why):
    """It would be planted nowhere, and its absence taken for a check that does not work."""
    problems, warnings = found(command, name, settings=settings)
    assert [why in line for line in problems] == [True]
    assert warnings == []


def test_a_fault_that_no_sync_mends_may_be_planted_in_training(found):
    assert found("train", "zero-rotary")[0] == []
    assert found("train", "loss-scale", settings=("parallel.dp=2",))[0] == []
