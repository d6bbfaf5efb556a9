"""`vime train` for real: verdicts of the first step, interrupted and resumed runs, deaths, Ctrl-C."""

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
    """Everything but times."""
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows(run_dir)]


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
def test_a_killed_run_resumes_to_the_same_bits(uninterrupted, workspace, tmp_path):
    """Trainer killed in rollout 2 or 3; resumed from the newest checkpoint: same numbers, same final weights."""
    run_dir = tmp_path / "interrupted"
    arguments = ["train", workspace / "run.toml", f"run.dir={run_dir}"]
    arguments += ["checkpoint.save_interval=1", "checkpoint.export_hf=true"]
    command = Command(arguments)
    command.wait_for_line(r"^rollout 1/4 ")
    os.kill(command.one("ray::TrainerActor"), signal.SIGKILL)
    killed = time.monotonic()
    assert command.finish(BOUND_SECONDS) == 3
    assert time.monotonic() - killed < BOUND_SECONDS
    assert "trainer rank 0 died" in "\n".join(command.lines[-2:])
    assert command.left_behind() == []

    resumed = vime(*arguments, "--resume", run_dir)
    assert resumed.process.returncode == 0, resumed.text
    assert f"resumed from {run_dir}/checkpoints/rollout_00000" in resumed.text
    assert "log_probs == ref_log_probs" not in resumed.text
    whole = uninterrupted[1]
    assert numbers(run_dir) == numbers(whole)
    weights = "hf/model.safetensors"
    assert (run_dir / weights).read_bytes() == (whole / weights).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["actor", "engine core"])
def test_a_killed_engine_is_named(workspace, tmp_path, victim):
    command = Command(["train", workspace / "run.toml", f"run.dir={tmp_path / 'run'}", "run.num_rollouts=5000"])
    command.wait_for_line(r"^rollout 1/5000 ")
    core = command.child_of("ray::EngineActor")
    os.kill(core if victim == "engine core" else int(stat(core)[1]), signal.SIGKILL)
    assert command.finish(BOUND_SECONDS) == 3
    assert "engine 0" in "\n".join(command.lines[-3:])
    assert command.left_behind() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "pattern"), [(signal.SIGINT, "starting|^engines|^trainer"), (signal.SIGTERM, "^rollout 1/")]
)
def test_an_interrupt_leaves_nothing(workspace, tmp_path, number, pattern):
    command = Command(["train", workspace / "run.toml", f"run.dir={tmp_path / 'run'}", "run.num_rollouts=5000"])
    command.wait_for_line(pattern)
    os.killpg(command.process.pid, number)
    assert command.finish(BOUND_SECONDS) == 130
    assert command.lines[-1] == "interrupted"
    assert command.left_behind() == []


def test_a_failing_reward_function_ends_the_run_with_its_name(workspace, tmp_path):
    """Case T27: SystemExit inside the reward is a failure with a cause, not a success."""
    (tmp_path / "my_reward.py").write_text("def score(sample):\n    raise SystemExit(0)\n")
    command = vime(
        "train",
        workspace / "run.toml",
        f"run.dir={tmp_path / 'run'}",
        "reward.name=user",
        "reward.function=my_reward:score",
        PYTHONPATH=str(tmp_path),
    )
    assert command.process.returncode == 3
    assert "user (my_reward:score)" in "\n".join(command.lines[-3:])
    assert "SystemExit" in "\n".join(command.lines[-3:])


@pytest.mark.slow
def test_colocated_and_served_gives_the_same_numbers(uninterrupted, workspace, tmp_path):
    """Engines drop and regain their weights around each step; the OpenAI endpoint is there meanwhile."""
    run_dir = tmp_path / "run"
    command = Command(
        [
            "train",
            workspace / "run.toml",
            f"run.dir={run_dir}",
            "run.num_rollouts=2",
            "cluster.colocate=true",
            "rollout.serve_openai=true",
            "checkpoint.save_interval=1",
        ]
    )
    url = command.wait_for_line("serves the OpenAI API at").split()[-1]
    with urlopen(f"{url}/models", timeout=20) as answer:
        assert json.load(answer)["data"]
    assert command.finish() == 0, command.text
    assert command.left_behind() == []
    assert numbers(run_dir) == numbers(uninterrupted[1])[:2]


@pytest.mark.slow
def test_num_rollouts_0_evaluates_once(workspace, tmp_path):
    """Case T28."""
    run_dir = tmp_path / "run"
    prompts = f'eval.prompts=["{workspace / "prompts.jsonl"}"]'
    command = vime("train", workspace / "run.toml", f"run.dir={run_dir}", "run.num_rollouts=0", prompts)
    assert command.process.returncode == 0, command.text
    (row,) = read_jsonl(run_dir / "metrics.jsonl")
    assert row["eval/num_prompts"] == 10
