"""`vime replay --regenerate` before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vime.preflight.planted import REGENERATE
from vime_cli.app import app
from vime_cli.regenerate import COMMAND

RUN = """
[model]
path = "model"
[data]
prompts = ["gone.jsonl"]
[reward]
name = "user"
function = "gone:reward"
"""


@pytest.fixture
def run_toml(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path / "run.toml"


def vime(*arguments: object):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_one_name_for_the_command() -> None:
    assert COMMAND == REGENERATE


def test_prompts_and_reward_are_not_looked_at(run_toml: Path) -> None:
    """Records bring their prompts: only the model is missing here."""
    found = vime("replay", run_toml, "--regenerate", "--load", "data_{rollout_id}.pt", "--dry-run")
    assert found.exit_code == 2
    assert "model.path" in found.output
    assert "gone" not in found.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--regenerate"], "--regenerate needs saved rollouts"),
        (["--regenerate", "--load", "a.pt", "--repeat", "2"], "it does not go with --repeat"),
        (["--regenerate", "--load", "a.pt", "--vs", "dp=2", "-n", "1"], "it does not go with --vs, --num-rollouts"),
        (["--regenerate", "--inspect", "a.pt"], "--regenerate"),
        (["--regenerate", "--load", "a.pt", "--inject", "wrong-chat-template"], "reads none"),
        (["--regenerate", "--load", "a.pt", "--inject", "loss-scale"], "starts none"),
    ],
)
def test_what_does_not_go_together(run_toml: Path, arguments: list[str], message: str) -> None:
    found = vime("replay", run_toml, *arguments)
    assert found.exit_code == 2
    assert message in found.output


def test_settings_are_those_of_a_rollout(run_toml: Path) -> None:
    found = vime("replay", run_toml, "--regenerate", "--load", "a.pt", "--print-config", "--json")
    assert found.exit_code == 0, found.output
    settings = {row["path"]: row["value"] for row in json.loads(found.stdout)}
    assert settings["debug.rollout_only"] is True
    assert settings["debug.load_rollout_data"] is None
