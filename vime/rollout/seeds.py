"""The seed of every sample, from where the sample stands and from nothing else."""

from __future__ import annotations

import hashlib

EVALUATION = -1
"""Stands for the rollout id in evaluations: they ask the same questions with the same seeds every time."""


def seed_for(run_seed: int, rollout_id: int, group_id: int, index: int) -> int:
    """A number in 0..2**53-1 (exact in JSON and float64): distinct inside a group, equal when re-run, whatever the
    number of engines or the order of requests.
    """
    key = f"{run_seed}/{rollout_id}/{group_id}/{index}".encode("ascii")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11
