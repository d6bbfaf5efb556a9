"""``vime debug-attach stacks`` and the watchdog on real runs that hang: each names who, and no process is left."""

from __future__ import annotations

import json
import os
import re

import pytest
from commands import Command, vime

GENERATE = """
import asyncio

async def forgets_to_wake(engine, prompt, seeds, sampling):
    if prompt.group_id == 2:
        await asyncio.sleep(500)
    return await engine.generate(prompt, seeds, sampling)
"""


def errors(command: Command) -> list[str]:
    return [line.removeprefix("error: ") for line in command.lines if line.startswith("error: ")]


def asked(run_dir, *options: str) -> str:
    """What ``stacks`` prints on stdout."""
    command = vime("debug-attach", "stacks", *([run_dir] if run_dir is not None else []), *options)
    assert command.process.returncode == 0, command.text
    return command.text


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_by_the_command_and_unasked_by_the_watchdog(workspace, tmp_path, uninterrupted):
    run_dir = tmp_path / "run"
    arguments = ["replay", workspace / "run.toml", f"run.dir={run_dir}", "--ids", "0", "parallel.dp=2"]
    arguments += ["train.step_timeout_seconds=30", "--load", workspace / "records/data_{rollout_id}.pt"]
    command = Command([*arguments, "--inject", "hung-rank"])
    command.wait_for_line("PASS  engine log_probs == trainer log_probs")  # the step comes next
    found = {"culprit": ""}
    while not re.search("rank 0 waits", found["culprit"]) and command.process.poll() is None:
        found = json.loads(asked(run_dir, "--json"))
    named = r"trainer rank 1 is in faults\.py:\d+ _hang; rank 0 waits for it in start_grad_sync"
    assert re.fullmatch(named, found["culprit"])
    assert {p["source"] for p in found["processes"]} <= {"py-spy", "faulthandler"}
    text = asked(run_dir)
    assert text.startswith(f"{run_dir}: {found['culprit']}\n\ntrainer rank 1: ")
    one = asked(run_dir, "--rank", "1")
    assert one.count("====") == 1
    assert " time.sleep" not in one
    assert "_hang (" in one
    missing = vime("debug-attach", "stacks", run_dir, "--rank", "2")
    assert (missing.process.returncode, "there are: 0, 1" in missing.text) == (2, True)

    assert command.finish() == 3, command.text
    assert command.left_behind() == []
    culprit, waited, stacks = errors(command)
    assert re.fullmatch(named, culprit)
    assert waited == "optimizer step: no answer from trainer rank 0, trainer rank 1 within 30 s"
    (file,) = run_dir.glob("stacks_train_limit_*.txt")
    assert stacks == f"stacks of 3 processes: {file}"
    assert "==== trainer rank 1 (pid " in file.read_text()
    ended = vime("debug-attach", "stacks", run_dir)
    assert ended.process.returncode == 2
    assert "the run has ended" in ended.text


@pytest.mark.slow
def test_a_user_function_that_hangs_is_named(workspace, tmp_path):
    (tmp_path / "generating.py").write_text(GENERATE)
    command = vime(
        "rollout",
        workspace / "run.toml",
        f"run.dir={tmp_path / 'run'}",
        "-n1",
        "rollout.timeout_seconds=8",
        "rollout.generate=generating:forgets_to_wake",
        PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    )
    assert command.process.returncode == 3, command.text
    culprit, waited, stacks = errors(command)
    assert culprit == "rollout.generate = generating:forgets_to_wake waits at generating.py:6 forgets_to_wake"
    assert waited.endswith("; pending: rollout.generate (generating:forgets_to_wake, engine 0): groups 2")
    assert re.match(r"stacks of 4 processes: .*stacks_generate_limit_", stacks)
    assert "engine 0 core: idle: no work" in command.text
