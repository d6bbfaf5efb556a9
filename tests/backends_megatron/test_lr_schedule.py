from __future__ import annotations

import pytest

from vime.backends.megatron.schedule import LrSchedule


def _rates(shape: str, num_warmup_steps: int = 0, end: float = 0.0) -> list[float]:
    schedule = LrSchedule(peak=1.0, end=end, shape=shape, num_warmup_steps=num_warmup_steps, num_steps=6)
    return [schedule.at(step) for step in range(6)]


def test_constant_with_warm_up():
    assert _rates("constant", 2) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_linear_starts_at_the_peak_and_ends_one_step_before_the_end():
    assert _rates("linear", 2, end=0.2) == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4])


def test_cosine():
    assert _rates("cosine") == pytest.approx([1.0, 0.9330127, 0.75, 0.5, 0.25, 0.0669873])


def test_steps_beyond_the_run_stay_at_the_end():
    assert LrSchedule(1.0, 0.25, "linear", 0, 4).at(99) == 0.25


def test_no_steps_at_all():
    assert LrSchedule(1.0, 0.0, "linear", 0, 0).at(0) == 1.0
