"""`vime rollout` without Megatron, `vime replay` without vLLM, and the same step under other layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import vime
from first_step import assert_same_first_step

from vime.metrics import read_jsonl

ABSENT = """
import importlib.machinery as machinery
found = machinery.PathFinder.find_spec
def find_spec(cls, name, path=None, target=None):
    return None if name.split(".")[0] == {name!r} else found(name, path, target)
machinery.PathFinder.find_spec = classmethod(find_spec)
"""


def without(name: str, folder: Path) -> str:
    """A PYTHONPATH under which ``name`` cannot be imported, in any process."""
    (folder / "sitecustomize.py").write_text(ABSENT.format(name=name))
    return str(folder)


@pytest.mark.slow
def test_rollout_needs_no_megatron(workspace, tmp_path, uninterrupted):
    template = tmp_path / "data_{rollout_id}.pt"
    command = vime(
        "rollout",
        workspace / "run.toml",
        "-n2",
        f"run.dir={tmp_path / 'run'}",
        "--save",
        template,
        PYTHONPATH=without("megatron", tmp_path),
    )
    # Nothing failed but the verdict on the answers, which is right: the model of the workspace is random.
    assert command.process.returncode == 1, command.text
    (failed,) = [line for line in command.lines if line.startswith("error: ")]
    assert failed.startswith("error: check failed: coherence: GARBLED: mean log-prob ")
    assert "likely: pretrained model: the checkpoint is as good as random; the engine agrees" in command.text
    from vime.record import read

    mine, trained = read(tmp_path / "data_0.pt"), read(workspace / "records/data_0.pt")
    assert mine.token_ids_T.tolist() == trained.token_ids_T.tolist()
    assert mine.rewards_N.tolist() == trained.rewards_N.tolist()
    assert (tmp_path / "data_1.pt").exists()


@pytest.mark.slow
def test_replay_needs_no_vllm_and_repeats_the_recorded_steps_bitwise(workspace, tmp_path, uninterrupted):
    command = vime(
        "replay",
        workspace / "run.toml",
        f"run.dir={tmp_path / 'run'}",
        "checkpoint.export_hf=true",
        "--load",
        workspace / "records/data_{rollout_id}.pt",
        PYTHONPATH=without("vllm", tmp_path),
    )
    assert command.process.returncode == 0, command.text
    names = ["train/loss", "train/grad_norm", "rollout/log_probs", "rollout/ref_log_probs", "train/pg_loss"]
    recorded = [r for r in read_jsonl(uninterrupted[1] / "metrics.jsonl") if "train/loss" in r]
    replayed = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert [[r[n] for n in names] for r in replayed] == [[r[n] for n in names] for r in recorded]
    assert "PASS  replay against the recorded run: 29 quantities within limits; not tested: gradients" in command.text
    weights = "hf/model.safetensors"
    assert (tmp_path / "run" / weights).read_bytes() == (uninterrupted[1] / weights).read_bytes()


@pytest.mark.slow
def test_a_layout_agrees_with_one_process(workspace, tmp_path, uninterrupted):
    """Two tensor-parallel ranks; other layouts: test_compare_e2e.py."""
    command = vime(
        "replay",
        workspace / "run.toml",
        "-n1",
        f"run.dir={tmp_path / 'run'}",
        "parallel.tp=2",
        "--load",
        workspace / "records/data_{rollout_id}.pt",
    )
    assert command.process.returncode == 0, command.text
    assert_same_first_step(tmp_path / "run", uninterrupted[1])
    assert "PASS  replay against the recorded run: 7 quantities within limits; not tested: gradients, weights" in (
        command.text
    ), command.text
