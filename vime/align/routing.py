"""Experts of tokens on two sides: where they differ, and whether that explains a difference of log-probs.

Axes: T tokens, M layers with experts, K experts of a token, E experts of a layer.
"""

from __future__ import annotations

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
