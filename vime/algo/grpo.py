"""GRPO: the advantage of a sample is its reward relative to its group (Shao et al. 2024, arXiv:2402.03300).

A_i = (r_i - mean_group) / (std_group + 1e-6), std without Bessel's correction; ``algo.normalize_std = false`` drops the
division (Dr. GRPO, arXiv:2503.20783, whose other half is ``algo.loss_normalization = "constant"``).
Empty signal: in a group whose rewards are all equal, and in a group of one, every advantage is exactly 0.
"""

from __future__ import annotations

import numpy as np

from vime.config.schema import Algo

STD_EPSILON = 1e-6


def advantages(algo: Algo, rewards_N: np.ndarray, group_ids_N: np.ndarray) -> np.ndarray:
    """float64 [N]. Groups are found by id, never by position."""
    _, group_N = np.unique(group_ids_N, return_inverse=True)
    size_G = np.bincount(group_N)
    mean_G = np.bincount(group_N, weights=rewards_N) / size_G
    low_G = np.full(len(size_G), np.inf)
    high_G = np.full(len(size_G), -np.inf)
    np.minimum.at(low_G, group_N, rewards_N)
    np.maximum.at(high_G, group_N, rewards_N)
    centred_N = np.where((low_G == high_G)[group_N], 0.0, rewards_N - mean_G[group_N])
    if not algo.normalize_std:
        return centred_N
    std_G = np.sqrt(np.bincount(group_N, weights=centred_N**2) / size_G)
    return centred_N / (std_G[group_N] + STD_EPSILON)
