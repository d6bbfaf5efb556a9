"""The requests of a search for a crash: from a record, and written as one, with prompts, seeds and options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.tiny.make_model import make_tiny_model
from vime.config.load import load
from vime.errors import UsageError
from vime.runs.crash import check
from vime.runs.crash_requests import requests_of

RUN = """
[model]
path = "{model}"
[data]
prompts = ["prompts.jsonl"]
[rollout]
rollout_batch_size = 4
num_samples_per_prompt = 2
[rollout.sampling]
max_response_len = 8
temperature = 0.5
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("crash")
    model = make_tiny_model(folder / "model", steps=0)
    rows = [{"prompt": f"{a}+1=", "label": str(a + 1)} for a in range(6)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text(RUN.format(model=model))
    return folder / "run.toml"


def test_those_of_rollout_0_are_those_that_a_rollout_would_send(run):
    found = requests_of(load([run]), None, None)
    assert found.names == [f"{group}/{index}" for group in range(4) for index in range(2)]
    rows = found.as_rows()
    assert rows[0][1] == rows[1][1]  # one prompt,
    assert rows[0][2] != rows[1][2]  # two seeds
    assert rows[0][3]["temperature"] == 0.5


def test_a_part_of_them_is_written_and_read_back_the_same(run, tmp_path):
    loaded = load([run])
    found = requests_of(loaded, None, None)
    path = tmp_path / "minimal.pt"
    found.save([3, 6], path)
    again = requests_of(load([run], ["rollout.sampling.max_response_len=2"]), str(path), None)
    assert again.names == ["1/1", "3/0"]
    want = [found.as_rows()[i] for i in (3, 6)]
    assert [row[:3] for row in again.as_rows()] == [row[:3] for row in want]
    assert again.as_rows()[0][3] == want[0][3] | {"max_response_len": 2}  # the command line wins
    assert requests_of(loaded, str(path), None).as_rows() == want
    assert again.described()[0].text == found.described()[3].text


def test_there_is_room_for_the_longest_answer(run, tmp_path):
    loaded = load([run])
    path = tmp_path / "data.pt"
    requests_of(loaded, None, None).save([0], path)
    shorter = load([run], ["rollout.max_context_len=32"])
    config = requests_of(shorter, str(path), None).longest(shorter.config)
    assert config.rollout.sampling.max_response_len == 8


def test_a_record_that_is_not_there(run):
    with pytest.raises(UsageError, match=r"nowhere\.pt"):
        requests_of(load([run]), "nowhere.pt", None)


def test_engines_of_somebody_else_are_not_started_again_and_again(run):
    loaded = load([run], ['rollout.engines=["http://h:1"]', "debug.rollout_only=true"])
    with pytest.raises(UsageError, match="starts engines of its own"):
        check(loaded)
