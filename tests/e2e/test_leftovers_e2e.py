"""`vime rollout` over modules with forgotten breakpoints, for real: it neither stops nor fails, and says so (D16)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import vime

from examples.tiny.make_model import make_tiny_model

RUN = """
[run]
name = "forgetful"
num_rollouts = 2
[model]
path = "model"
[data]
prompts = ["prompts.jsonl"]
[rollout]
rollout_batch_size = 4
num_samples_per_prompt = 4
generate = "forgetful_generate:generate"
sampling = { max_response_len = 4 }
[reward]
name = "user"
function = "forgetful_reward:score"
num_workers = 2
[vllm]
kv_cache_memory_bytes = 33554432
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
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forgetful")
    make_tiny_model(folder / "model")
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(5) for b in range(2)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text(RUN)
    (folder / "forgetful_reward.py").write_text(REWARD)
    (folder / "forgetful_beside.py").write_text(BESIDE)
    (folder / "forgetful_generate.py").write_text(GENERATE)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["", "ray.util.rpdb.set_trace"], ids=["plain", "as in a Ray job"])
def test_forgotten_breakpoints_neither_stop_nor_end_a_run(forgetful: Path, tmp_path: Path, hook: str) -> None:
    """Driver and reward workers; each place is warned about once, whoever set PYTHONBREAKPOINT (case D01)."""
    command = vime("rollout", forgetful / "run.toml", f"run.dir={tmp_path / 'run'}", PYTHONBREAKPOINT=hook)
    assert command.process.returncode == 0, command.text
    said = [line.partition("; vime debug-attach")[0] for line in command.lines if "is ignored outside" in line]
    assert [line.replace(f"{forgetful}/", "").removesuffix(" is ignored outside debug runs") for line in said] == [
        "warning: breakpoint() in forgetful_reward.py:4",
        "warning: breakpoint() in forgetful_reward.py:8",
        "warning: pdb.set_trace() in forgetful_reward.py:9",
        "warning: debugpy.wait_for_client() in forgetful_beside.py:5",
        "warning: breakpoint() in forgetful_generate.py:2",
    ]
    assert "Traceback" not in command.text
