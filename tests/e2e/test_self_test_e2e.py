"""`vime align-check --self-test` for real: one model, one fault of the sync, one of the answers, one of the trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Command, vime

FAULTS = ("bf16-weights", "shifted-log-probs", "wrong-normalizer")


@pytest.fixture(scope="module")
def tested(tmp_path_factory: pytest.TempPathFactory) -> tuple[Command, Path]:
    page = tmp_path_factory.mktemp("self-test") / "faults.md"
    chosen = [word for name in FAULTS for word in ("--fault", name)]
    return vime("align-check", "--self-test", "--family", "qwen3", *chosen, "--json", "--markdown", page), page


def test_every_fault_is_caught_by_its_check_alone_and_the_clean_walk_is_clean(tested: tuple[Command, Path]) -> None:
    command, _ = tested
    text = command.text
    found = json.loads(text[text.index("\n{\n") :])
    assert command.process.returncode == 0, text
    assert found["problems"] == []
    outcomes = {walk["fault"]: (walk["outcome"], walk["claims"]) for walk in found["walks"]}
    assert outcomes == {
        "": ("clean", []),
        "bf16-weights": ("caught", ["weights"]),
        "shifted-log-probs": ("caught", ["tokens"]),
        "wrong-normalizer": ("caught", ["gradients"]),
    }
    assert "qwen3, bf16-weights: caught" in text


def test_the_page_has_what_the_checks_said(tested: tuple[Command, Path]) -> None:
    _, page = tested
    text = page.read_text(encoding="utf-8")
    assert "written by `vime align-check --self-test --markdown docs/faults.md`" in text
    (row,) = (line for line in text.splitlines() if line.startswith("| `bf16-weights` |"))
    assert "| 3 `weights` |" in row
    assert "engine 0 received" in row
