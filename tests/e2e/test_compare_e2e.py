"""``vime replay --vs``, ``--repeat``, ``--inject`` and ``--ids`` on real trainer processes: cases P05, P07, P14."""

from __future__ import annotations

import json

import pytest
from commands import Command, vime
from first_step import assert_same_first_step

from vime.metrics import read_jsonl


def replay(workspace, tmp_path, *arguments) -> Command:
    template = workspace / "records/data_{rollout_id}.pt"
    return vime("replay", workspace / "run.toml", f"run.dir={tmp_path / 'run'}", "--load", template, *arguments)


def compared(command: Command) -> dict:
    """The only comparison of a run with --json, rows by (rollout, quantity)."""
    text = command.text
    (found,) = json.loads(text[text.index("\n{\n") :].partition("\nerror: ")[0])["comparisons"]
    return found | {"by": {(row["rollout_id"], row["quantity"]): row for row in found["rows"]}}


@pytest.mark.slow
def test_tp2_x_pp2_agrees_with_one_process_tensor_by_tensor(workspace, tmp_path, uninterrupted):
    """Case P14, over two rollouts: the second trains from weights that each layout has updated itself."""
    command = replay(workspace, tmp_path, "--ids", "0:2", "parallel.tp=2", "parallel.pp=2", "--vs", "one", "--json")
    assert command.process.returncode == 0, command.text
    found = compared(command)
    assert found["verdict"] == "PASS"
    assert {row["verdict"] for row in found["rows"]} == {"PASS"}
    first, later = found["by"][0, "log_probs"], found["by"][1, "log_probs"]
    assert first["numbers"]["max"] < 1e-5
    assert (first["limit"], later["limit"]) == ("1e-05", "0.0001")
    for name in ("loss", "grad_norm"):
        assert found["by"][0, name]["numbers"]["max relative"] < 1e-5
    gradients = found["by"][0, "gradients"]
    assert gradients["numbers"]["tensors"] == 47
    assert gradients["numbers"]["max relative L2"] < 1e-4
    assert gradients["numbers"]["min cosine"] > 0.999999
    assert "stage" in gradients["where"]
    assert len(gradients["tensors"]) == 47
    assert {"name", "held_by", "relative_l2", "cosine", "max_abs"} <= set(gradients["tensors"][0])
    assert "differs: parallel.tp 1 -> 2, parallel.pp 1 -> 2" in found["notes"]
    assert not list((tmp_path / "run").glob(".comparison*"))
    assert_same_first_step(tmp_path / "run", uninterrupted[1])


@pytest.mark.slow
def test_two_packings_agree(workspace, tmp_path, uninterrupted):
    """Case P14, in two pipeline stages; the table is printed for people."""
    packing = ["parallel.pp=2", "train.max_tokens_per_micro_batch=40", "--vs", "max_tokens_per_micro_batch=4096"]
    command = replay(workspace, tmp_path, "--ids", "0", *packing)
    assert command.process.returncode == 0, command.text
    assert "PASS  replay against max_tokens_per_micro_batch=4096: 9 quantities within limits" in command.text
    for quantity in ("weights before", "log_probs", "loss", "gradients", "weights"):
        assert any(line.split()[:1] == ["0"] and f" {quantity} " in line for line in command.lines), quantity
    assert "gradients of rollout 0, the worst 5 of 47 parameters (all: --json)" in command.text
    assert_same_first_step(tmp_path / "run", uninterrupted[1])


@pytest.mark.slow
def test_a_replay_repeats_itself_bitwise(workspace, tmp_path, uninterrupted):
    command = replay(workspace, tmp_path, "--ids", "0:2", "parallel.dp=2", "--repeat", "2", "--json")
    assert command.process.returncode == 0, command.text
    found = compared(command)
    assert {row["verdict"] for row in found["rows"]} == {"PASS"}
    assert {row["limit"] for row in found["rows"]} == {"bitwise"}
    assert_same_first_step(tmp_path / "run", uninterrupted[1])


@pytest.mark.slow
def test_a_loss_that_counts_twice_on_one_rank_is_caught_and_located(workspace, tmp_path, uninterrupted):
    command = replay(workspace, tmp_path, "--ids", "0", "parallel.dp=2", "--inject", "loss-scale", "--json")
    assert command.process.returncode == 1, command.text
    found = compared(command)
    assert found["by"][0, "log_probs"]["verdict"] == "PASS"
    assert found["measured"].startswith("first mismatch: rollout 0, loss: ")
    assert found["by"][0, "loss"]["where"].partition(": ")[0].endswith("(dp rank 1)")
    assert found["by"][0, "loss"]["evidence"] == [
        "dp rank 0: 0 of 8 samples over",
        "dp rank 1: 8 of 8 samples over, loss x 2",
    ]


@pytest.mark.slow
def test_exchanged_shards_are_caught_and_located(workspace, tmp_path, uninterrupted):
    arguments = ["--ids", "0", "parallel.tp=2", "--vs", "tp=1", "--inject", "shard-order", "--json"]
    command = replay(workspace, tmp_path, *arguments)
    assert command.process.returncode == 1, command.text
    found = compared(command)
    assert found["by"][0, "weights before"]["where"] == (
        "model.layers.0.self_attn.o_proj.weight (ranks 0-1): its 2 shards are exchanged along dimension 1"
    )
    assert found["by"][0, "log_probs"]["verdict"] == "FAIL"
    assert found["by"][0, "ref_log_probs"]["verdict"] == "PASS"


@pytest.mark.slow
def test_a_dropped_sample_is_caught_and_located(workspace, tmp_path, uninterrupted):
    command = replay(workspace, tmp_path, "--ids", "0", "parallel.dp=2", "--inject", "dropped-sample")
    assert command.process.returncode == 1, command.text
    (line,) = [line for line in command.lines if line.startswith("error: ")]
    assert "not trained on as the data says: (1) sample " in line
    assert "of data-parallel rank 1 (0 of " in line
    assert not list((tmp_path / "run").glob(".comparison*"))


@pytest.mark.slow
def test_rollouts_from_the_middle_are_not_judged_by_a_run_that_had_trained_before(workspace, tmp_path, uninterrupted):
    command = replay(workspace, tmp_path, "--ids", "2:4", "--json")
    assert command.process.returncode == 0, command.text
    found = compared(command)
    assert found["verdict"] == "NOT TESTED"
    assert "the recorded run had trained on 2 rollouts before" in found["cause"]
    rows = [row for row in read_jsonl(tmp_path / "run/metrics.jsonl") if "train/loss" in row]
    assert [row["rollout_id"] for row in rows] == [2, 3]
    assert "records: rollouts 2-3, 2 of the 4 recorded" in command.text
