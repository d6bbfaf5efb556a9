"""What a run says and writes about steps that were not taken, and about rollouts that teach nothing."""

import io
from pathlib import Path

import numpy as np
import pytest
from fakes import sample

from vime.config.schema import Config
from vime.log import Progress
from vime.metrics import JsonlSink, Metrics, read_jsonl
from vime.observe import Observer
from vime.types import RolloutBatch, StepStats

CONFIG = Config.model_validate({"model": {"path": "m"}, "data": {"prompts": ["a.jsonl"]}, "log": {"show_samples": 0}})


@pytest.fixture
def observed(tmp_path):
    """(observer, what it said, rows it wrote)."""
    said = io.StringIO()
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    observer = Observer(CONFIG, Progress(9, said, False), Metrics([sink]), Path, verify_first_step=False)
    return observer, said, lambda: read_jsonl(tmp_path / "metrics.jsonl")


def stats(**changes):
    return StepStats(**{"loss": 0.5, "grad_norm": 2.0, "lr": 1e-6, "num_tokens": 4, "seconds": 0.1, **changes})


def turn(observer, rewards, *steps, rollout_id=0):
    batch = RolloutBatch.from_samples(rollout_id, [sample(i // 2, i % 2, reward=r) for i, r in enumerate(rewards)])
    with observer.rollout(rollout_id):
        observer.produced(batch)
        for step in steps:
            observer.stepped(step)


def test_a_skipped_step_is_said_and_counted_and_has_no_loss(observed):
    """Case T12: not a loss of 0.0 and a clean exit."""
    observer, said, rows = observed
    turn(observer, [0.0, 1.0], stats(loss=0.0, is_skipped=True, skip_reason="no trainable token in this step"))
    assert "warning: optimizer step skipped, weights unchanged: no trainable token in this step" in said.getvalue()
    (row,) = rows()
    assert row["train/num_skipped_steps"] == 1
    assert "train/loss" not in row
    assert "train/grad_norm" not in row


def test_skipped_steps_do_not_enter_the_means(observed):
    """Case T23: one of two steps had a NaN; the loss of the row is that of the other, and the count is 1."""
    observer, said, rows = observed
    bad = stats(
        loss=float("nan"), is_skipped=True, skip_reason="loss nan: gradient not finite in (1) model.norm.weight"
    )
    turn(observer, [0.0, 1.0], bad, stats())
    (row,) = rows()
    assert (row["train/num_skipped_steps"], row["train/loss"], row["train/grad_norm"]) == (1, 0.5, 2.0)
    assert "model.norm.weight" in said.getvalue()


def test_a_record_has_no_speed_of_generation(observed):
    observer, _, rows = observed
    debug = observer.config.debug.model_copy(update={"load_rollout_data": "d_{rollout_id}.pt", "train_only": True})
    observer.config = observer.config.model_copy(update={"debug": debug})
    with observer.rollout(0), observer.phase("generate"):
        observer.produced(RolloutBatch.from_samples(0, [sample(0, 0, reward=1.0)]))
    assert "perf/generate_tokens_per_second" not in rows()[0]


def test_groups_without_spread_are_counted_and_warned_about(observed):
    """Case T09: rewards differ over the batch and never inside a group."""
    observer, said, rows = observed
    for rollout_id in range(3):
        turn(observer, [0.0, 0.0, 1.0, 1.0], rollout_id=rollout_id)
    assert [row["rollout/zero_spread_group_share"] for row in rows()] == [1.0] * 3
    assert rows()[0]["rollout/reward/std"] == 0.5
    assert said.getvalue().count("no group had a spread of rewards: advantages, loss and gradient are 0") == 1


def test_nothing_that_is_trained_is_nan(observed):
    """Case T06: one sample per prompt."""
    observer, _, rows = observed
    batch = RolloutBatch.from_samples(0, [sample(0, 0, reward=1.0)])
    with observer.rollout(0):
        observer.produced(batch)
    assert all(np.isfinite(v) for v in rows()[0].values())
