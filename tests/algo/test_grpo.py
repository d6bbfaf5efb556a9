"""GRPO advantages against hand-computed numbers; groups without a signal."""

import numpy as np
import pytest

from vime import algo
from vime.algo.grpo import advantages
from vime.config.schema import Algo
from vime.errors import UsageError


def test_hand_computed_group():
    got = advantages(Algo(), np.array([1.0, 0.0, 0.0, 1.0]), np.array([7, 7, 7, 7]))
    assert got == pytest.approx([1.0, -1.0, -1.0, 1.0], abs=1e-5)  # mean 0.5, std 0.5


def test_groups_are_found_by_id_not_by_position():
    rewards, groups = np.array([1.0, 5.0, 0.0, 7.0]), np.array([3, 9, 3, 9])
    got = advantages(Algo(normalize_std=False), rewards, groups)
    assert got.tolist() == [0.5, -1.0, -0.5, 1.0]
    shuffled = np.array([2, 0, 3, 1])
    again = advantages(Algo(normalize_std=False), rewards[shuffled], groups[shuffled])
    assert again.tolist() == got[shuffled].tolist()


@pytest.mark.parametrize("value", [0.1, 1.0, -3.7, 1e9])
def test_equal_rewards_give_exactly_zero(value):
    """0.1 + 0.1 + 0.1 over 3 is not 0.1: without a rule the group would be trained on rounding (case T09)."""
    assert advantages(Algo(), np.full(3, value), np.zeros(3, int)).tolist() == [0.0, 0.0, 0.0]


def test_a_group_of_one_has_no_signal_and_no_nan():
    """Case T06."""
    assert advantages(Algo(), np.array([1.0]), np.array([0])).tolist() == [0.0]


def test_dr_grpo_does_not_divide():
    assert advantages(Algo(normalize_std=False), np.array([1.0, 0.0]), np.zeros(2, int)).tolist() == [0.5, -0.5]


def test_unknown_name_lists_the_choices():
    with pytest.raises(UsageError) as error:
        algo.find("grppo")
    assert "grpo" in error.value.hint
