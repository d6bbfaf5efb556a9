"""Experts of tokens on two sides: where they differ, and whether that explains a difference of log-probs.

Axes: T tokens, M layers with experts, K experts of a token, E experts of a layer.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np


def tie_margin(logits_TE: np.ndarray, experts_TK: np.ndarray) -> np.ndarray:
    """float32 [T]: the smallest logit of the experts chosen less the largest of the others. Negative: chosen by more
    than the logits (a bias). inf where every expert is chosen.
    """
    chosen_TE = np.zeros(logits_TE.shape, bool)
    np.put_along_axis(chosen_TE, experts_TK.astype(np.int64), True, axis=1)
    least_T = np.where(chosen_TE, logits_TE, np.inf).min(1)
    next_T = np.where(chosen_TE, -np.inf, logits_TE).max(1)
    return (least_T - next_T).astype(np.float32)


def differs(one_TMK: np.ndarray, other_TMK: np.ndarray) -> np.ndarray:
    """bool [T, M]: the sets of experts are not the same (both sorted along K)."""
    return (one_TMK != other_TMK).any(-1)


def first_places(differs_TM: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """bool [T, M]: of each sample, the places in the lowest layer where any of its tokens differ. Above it, inputs
    differ already.
    """
    out_TM = np.zeros_like(differs_TM)
    for a, b in pairwise(offsets):
        layers = np.flatnonzero(differs_TM[a:b].any(0))
        if layers.size:
            out_TM[a:b, layers[0]] = differs_TM[a:b, layers[0]]
    return out_TM


def before(flags_T: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """bool [T]: the flag of the token before, in the same sample: that of the position that predicts a token."""
    out_T = np.zeros_like(flags_T)
    out_T[1:] = flags_T[:-1]
    out_T[offsets[:-1]] = False
    return out_T


def touched(differs_TM: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """bool [T]: tokens predicted at or after the first token of their sample that went to other experts."""
    out_T = np.zeros(len(differs_TM), bool)
    for a, b in pairwise(offsets):
        out_T[a:b] = np.logical_or.accumulate(differs_TM[a:b].any(1))
    return before(out_T, offsets)
