"""The first step of a replay in another layout against the run of one process that was recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from vime.metrics import read_jsonl


def first_step(run_dir: Path) -> dict[str, float]:
    return next(row for row in read_jsonl(run_dir / "metrics.jsonl") if "train/loss" in row)


def assert_same_first_step(run_dir: Path, recorded: Path) -> None:
    """Case P05: what is said of the samples does not depend on the ranks that they were split over."""
    one, other = first_step(recorded), first_step(run_dir)
    for name in ("train/loss", "train/grad_norm"):
        assert other[name] == pytest.approx(one[name], rel=1e-5)
    assert other["rollout/log_probs"] == pytest.approx(one["rollout/log_probs"], abs=1e-6)
    assert other["rollout/kl"] == 0.0
    of_samples = [name for name in one if name.startswith("rollout/") and "log_probs" not in name]
    assert [other[name] for name in of_samples] == [one[name] for name in of_samples]
