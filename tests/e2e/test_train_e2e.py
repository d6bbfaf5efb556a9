"""`vime train` for real: verdicts of the first step, interrupted and resumed runs, deaths, Ctrl-C.

A start of all processes costs seconds: a run that ends early, or that is resumed, serves several tests.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from urllib.request import urlopen

import pytest
from commands import Command, stat, vime

from vime.metrics import read_jsonl

BOUND_SECONDS = 60  # from the fault to the end of the command


def rows(run_dir: Path) -> list[dict[str, float]]:
    return [row for row in read_jsonl(run_dir / "metrics.jsonl") if "rollout/raw_reward" in row]


def numbers(run_dir: Path) -> list[dict[str, float]]:
    """Everything but times, and what a sync verified: a resumed process begins again with every tensor."""
    verified = ("weights/num_compared", "weights/verify_time")
    return [{k: v for k, v in row.items() if not k.startswith("perf/") and k not in verified} for row in rows(run_dir)]


def test_the_first_step_is_exact(uninterrupted):
    command, run_dir = uninterrupted
    assert "PASS  log_probs == ref_log_probs: 0 of" in command.text
    assert "PASS  engine log_probs == trainer log_probs: max" in command.text
    first, *later = rows(run_dir)
    assert first["rollout/kl"] == 0.0
    assert first["train/kl_loss"] == 0.0
    assert first["train/ppo_kl"] == 0.0
    assert first["train/grad_norm"] > 0
    assert all(row["rollout/kl"] != 0.0 for row in later)
    assert max(row["train/train_rollout_logprob_abs_diff/max"] for row in rows(run_dir)) < 1e-5


def test_every_sync_is_shown_with_equal_digests(uninterrupted):
    command, run_dir = uninterrupted
    assert [row["weights/version"] for row in rows(run_dir)] == [1, 2, 3, 4]
    for version in range(5):
        assert f"weights v{version}: 47 tensors" in command.text
    assert command.text.count("received = trainer 47/47, held = trainer 47/47") == 1
    later = re.findall(r"received = trainer (\d)/\1 \(of 47\), held = trainer \1/\1 \(of 47\)", command.text)
    assert [int(num) for num in later] == [5, 5, 5, 5]  # 47 tensors over ten syncs, the first seven of them one more


def test_the_exported_model_is_the_trained_one(uninterrupted, workspace):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    _, run_dir = uninterrupted
    trained, start = load_file(run_dir / "hf/model.safetensors"), load_file(workspace / "model/model.safetensors")
    assert trained.keys() == start.keys()
    assert all((trained[name] != start[name]).any() for name in start if "proj" in name)
    model = AutoModelForCausalLM.from_pretrained(run_dir / "hf")
    assert sum(p.numel() for p in model.parameters()) == sum(t.numel() for t in trained.values())


def test_metrics_are_one_json_object_a_line(uninterrupted):
    _, run_dir = uninterrupted
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["rollout_id"] for line in lines if "rollout/raw_reward" in line] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.timeout(900)  # three starts, each within its own limit
def test_a_run_that_lost_its_trainer_and_then_its_engine_resumes_to_the_same_bits(uninterrupted, workspace, tmp_path):
    """Colocated and served: engines drop and regain their weights around each step, and answer at their endpoint.

    The trainer is killed in rollout 2 or 3, the engine core once it is resumed: in the end the numbers and the weights
    are those of a run that was neither killed nor colocated.
    """
    run_dir = tmp_path / "interrupted"
    arguments = ["train", workspace / "run.toml", f"run.dir={run_dir}", "cluster.colocate=true"]
    arguments += ["rollout.serve_openai=true", "checkpoint.save_interval=1", "checkpoint.export_hf=true"]
    command = Command(arguments)
    url = command.wait_for_line("serves the OpenAI API at").split()[-1]
    with urlopen(f"{url}/models", timeout=20) as answer:
        assert json.load(answer)["data"]
    command.wait_for_line(r"^rollout 1/4 ")
    os.kill(command.one("ray::TrainerActor"), signal.SIGKILL)
    killed = time.monotonic()
    assert command.finish(BOUND_SECONDS) == 3
    assert time.monotonic() - killed < BOUND_SECONDS
    assert "trainer rank 0 died" in "\n".join(command.lines[-2:])
    assert command.left_behind() == []

    second = Command([*arguments, "--resume", run_dir])
    second.wait_for_line(r"weights v\d+: 47 tensors")
    os.kill(second.child_of("ray::EngineActor"), signal.SIGKILL)
    assert second.finish(BOUND_SECONDS) == 3
    assert "engine 0" in "\n".join(second.lines[-3:])
    assert second.left_behind() == []

    resumed = vime(*arguments, "--resume", run_dir)
    assert resumed.process.returncode == 0, resumed.text
    assert f"resumed from {run_dir}/checkpoints/rollout_00000" in resumed.text
    assert "log_probs == ref_log_probs" not in resumed.text
    whole = uninterrupted[1]
    assert numbers(run_dir) == numbers(whole)
    weights = "hf/model.safetensors"
    assert (run_dir / weights).read_bytes() == (whole / weights).read_bytes()


@pytest.mark.slow
def test_a_killed_engine_actor_is_named(workspace, tmp_path):
    command = Command(["rollout", workspace / "run.toml", f"run.dir={tmp_path / 'run'}", "-n", 5000])
    command.wait_for_line(r"^rollout 1/5000 ")
    os.kill(int(stat(command.child_of("ray::EngineActor"))[1]), signal.SIGKILL)
    assert command.finish(BOUND_SECONDS) == 3
    assert "engine 0" in "\n".join(command.lines[-3:])
    assert command.left_behind() == []


@pytest.mark.slow
def test_an_interrupt_leaves_nothing(workspace, tmp_path):
    """While processes start; later on: test_turns_e2e.py."""
    command = Command(["train", workspace / "run.toml", f"run.dir={tmp_path / 'run'}", "run.num_rollouts=5000"])
    command.wait_for_line("starting|^engines|^trainer")
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.finish(BOUND_SECONDS) == 130
    assert command.lines[-1] == "interrupted"
    assert command.left_behind() == []
