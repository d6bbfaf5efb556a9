"""Every example's run.toml loads, and its prompts are what its script makes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from vime.config.load import load
from vime.errors import ConfigError

FOLDERS = sorted(path.parent for path in (Path(__file__).parents[2] / "examples").glob("*/run.toml"))
IDS = [folder.name for folder in FOLDERS]


def test_there_are_examples() -> None:
    assert {"quickstart", "tiny"} <= set(IDS)


@pytest.mark.parametrize("folder", FOLDERS, ids=IDS)
def test_run_toml_loads_without_a_warning(folder: Path) -> None:
    loaded = load([folder / "run.toml"])
    assert loaded.warnings == ()
    assert loaded.config.run.num_rollouts > 0


@pytest.mark.parametrize("folder", FOLDERS, ids=IDS)
def test_files_named_in_run_toml_exist(folder: Path) -> None:
    config = load([folder / "run.toml"]).config
    named = [Path(name) for name in (*config.data.prompts, *config.eval.prompts)]
    assert named
    assert [path for path in named if not path.is_file()] == []


@pytest.mark.parametrize("folder", FOLDERS, ids=IDS)
def test_every_example_has_a_readme_with_its_command(folder: Path) -> None:
    assert f"vime train examples/{folder.name}/run.toml" in (folder / "README.md").read_text(encoding="utf-8")


def test_a_misspelt_setting_of_an_example_is_refused(examples: Path, tmp_path: Path) -> None:
    text = (examples / "tiny/run.toml").read_text(encoding="utf-8").replace("max_response_len", "max_response_length")
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="max_response_len"):
        load([tmp_path / "run.toml"])


@pytest.mark.parametrize("name", ["quickstart", "tiny"])
def test_prompts_regenerate_byte_for_byte(name: str, examples: Path, tmp_path: Path, script) -> None:
    script(f"{name}/make_prompts.py").write(tmp_path)
    for file in ("prompts.jsonl", "eval.jsonl"):
        assert (tmp_path / file).read_bytes() == (examples / name / file).read_bytes()


def test_labels_are_the_sums(examples: Path) -> None:
    for file in examples.glob("*/*.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            question = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
            assert sum(map(int, re.findall(r"\d+", question))) == int(row["label"]), (file, line)


def test_sums_of_the_quickstart_evaluation_are_unseen_in_training(examples: Path) -> None:
    def sums(file: str) -> set[frozenset[str]]:
        lines = (examples / "quickstart" / file).read_text(encoding="utf-8").splitlines()
        return {frozenset(re.findall(r"\d", json.loads(line)["prompt"][-1]["content"])) for line in lines}

    train, evaluation = sums("prompts.jsonl"), sums("eval.jsonl")
    assert len(evaluation) == 9
    assert len(train) > 9
    assert not train & evaluation


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("4 + 5 = 9.", True),
        ("9", True),
        ("4 + 5 equals 9, which is", True),
        ("9 or 4", False),
        ("19", False),
        ("", False),
    ],
)
def test_quickstart_pattern_takes_the_last_number(answer: str, right: bool, examples: Path) -> None:
    pattern = load([examples / "quickstart/run.toml"]).config.reward.pattern
    assert pattern is not None
    found = re.search(pattern, answer)
    assert bool(found and found[1] == "9") is right
