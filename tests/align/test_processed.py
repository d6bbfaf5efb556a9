"""Log-probs under sampling options, by hand."""

import math

import numpy as np
import pytest
import torch

from vime.align.processed import Position, log_probs

PROBS = [0.5, 0.3, 0.2]


def position(logits, ids=(0, 1), prompt_len=1):
    return Position(torch.tensor([logits], dtype=torch.float32), np.array(ids), prompt_len, np.array([len(ids) - 1]))


def scores(logits, options, ids=(0, 1)):
    found, log_s = log_probs(position(logits, ids), options)
    return float(found[0]), float(log_s[0])


@pytest.mark.parametrize(
    ("options", "log_prob", "log_s"),
    [
        ({}, math.log(0.3), 0.0),
        ({"top_p": 0.6}, math.log(0.3 / 0.8), math.log(0.8)),  # 0.5 alone is less than 0.6
        ({"top_p": 0.49}, -math.inf, math.log(0.5)),
        ({"top_k": 2}, math.log(0.3 / 0.8), math.log(0.8)),
        ({"top_k": 9}, math.log(0.3), 0.0),
        ({"top_k": 2, "top_p": 0.6}, -math.inf, math.log(0.5)),  # 0.5 is 0.625 of what top_k leaves
        ({"min_p": 0.5}, math.log(0.3 / 0.8), math.log(0.8)),  # 0.25 and more stay
        ({"temperature": 0.5}, math.log(0.09 / 0.38), 0.0),
        ({"temperature": 0.0}, math.log(0.3), 0.0),
    ],
)
def test_by_hand(options, log_prob, log_s):
    assert scores(np.log(PROBS).tolist(), options) == pytest.approx((log_prob, log_s), abs=1e-6)


def test_penalties_look_at_what_was_there_before():
    ids = (0, 2, 2, 1)  # one token of prompt, two sampled before
    raw = [2.0, 1.0, -1.0]

    def shares(logits):
        return math.log(math.exp(logits[1]) / sum(math.exp(x) for x in logits))

    assert scores(raw, {"repetition_penalty": 2.0}, ids)[0] == pytest.approx(shares([1.0, 1.0, -2.0]))
    assert scores(raw, {"presence_penalty": 0.5}, ids)[0] == pytest.approx(shares([2.0, 1.0, -1.5]))
    assert scores(raw, {"frequency_penalty": 0.5}, ids)[0] == pytest.approx(shares([2.0, 1.0, -2.0]))
