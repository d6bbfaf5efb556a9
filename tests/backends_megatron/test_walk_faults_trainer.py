"""Faults that align-check plants in a live trainer: each changes what it says, and healing restores every bit."""

from __future__ import annotations

import jobs
import numpy as np
import pytest
import random_models
import walk_fault_jobs

FAULTS = [
    "unloaded-tensor",
    "one-sided-temperature",
    "noisy-kernel",
    "router-bias",
    "packed-leak",
    "loss-scale",
    "dropped-sample",
    "wrong-normalizer",
    "memory-leak",
    "moved-reference",
    "stage-offset",
    "swapped-qk",
    "duplicated-lm-head",
    "shard-order",
    "no-such-fault",
]
DENSE_AT_DP_2 = {"router-bias", "shard-order", "no-such-fault"}
"""What a dense model at dp = 2 has no place for."""


@pytest.fixture(scope="module")
def found(pool, tiny, tmp_path_factory):
    """One start serves all."""
    folder = tmp_path_factory.mktemp("faults")
    copy = random_models.rewrite(tiny(), folder / "copy", lambda tensors: {n: 2 * t for n, t in tensors.items()})
    settings = jobs.config(tiny(), parallel={"dp": 2}, rollout={"sampling": {"temperature": 0.7}})
    return pool.run(2, walk_fault_jobs.all_faults, settings, FAULTS, str(folder), str(copy), timeout=300.0)[0]


def differs(one, other):
    """Keys of what was seen that are not equal, bit for bit."""

    def same(a, b):
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
        return np.array_equal(a, b)

    return {
        key for key in one.keys() | other.keys() if key not in one or key not in other or not same(one[key], other[key])
    }


@pytest.mark.parametrize("name", [n for n in FAULTS if n not in DENSE_AT_DP_2])
def test_healing_restores_every_bit(found, name):
    assert differs(found["start"], found[f"healed {name}"]) == set()


def test_healing_restores_every_bit_after_another_folder_was_loaded(found):
    weights = found["start"]["weights"]
    assert all(np.array_equal(found["copy"][name], 2 * weights[name]) for name in weights)
    assert differs(found["start"], found["healed copy"]) == set()


FORWARD = {"policy", "again", "ref", "ref after"}
STEP = {"loss", "grad_norm", "after"}


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("unloaded-tensor", {*FORWARD, *STEP, "weights"}),
        ("one-sided-temperature", {*FORWARD, *STEP}),
        ("noisy-kernel", {*FORWARD, *STEP}),
        ("packed-leak", {*FORWARD, *STEP}),
        ("loss-scale", STEP),
        ("dropped-sample", {*STEP, "ref after", "failed"}),
        ("wrong-normalizer", STEP),
        ("memory-leak", set()),
        ("moved-reference", {"ref after"}),
        ("stage-offset", {"weights", "after"}),
        ("swapped-qk", {"weights", "after"}),
        ("duplicated-lm-head", {"weights", "after"}),
    ],
)
def test_a_fault_changes_what_it_says_and_nothing_else(found, name, changed):
    said, seen = found[name]
    assert said
    assert differs(found["start"], seen) == changed


def test_noise_differs_between_two_forwards_and_is_small(found):
    _, seen = found["noisy-kernel"]
    gap = np.abs(seen["policy"] - seen["again"]).max()
    assert 0 < gap < 1e-3
    assert np.array_equal(found["start"]["policy"], found["start"]["again"])


def test_a_leak_reaches_every_sample_but_the_first_of_a_pack(found):
    _, seen = found["packed-leak"]
    rollout = jobs.batch()
    spans = zip(rollout.offsets[:-1], rollout.offsets[1:], strict=True)
    changed = [bool((seen["policy"][a:b] != found["start"]["policy"][a:b]).any()) for a, b in spans]
    assert any(changed)
    assert not all(changed)


def test_the_unloaded_tensor_is_one_norm_and_named(found):
    said, seen = found["unloaded-tensor"]
    right = found["start"]["weights"]
    (name,) = [n for n in right if not np.array_equal(seen["weights"][n], right[n])]
    assert (seen["weights"][name] == 1).all()
    assert "as it was before loading" in said


def test_a_fault_without_a_place_is_refused(found):
    assert found["router-bias"] == ("router-bias: qwen3 has no router", None)
    assert found["shard-order"] == ("the fault shard-order needs parallel.tp >= 2; parallel.tp = 1", None)
    assert found["no-such-fault"] == ("'no-such-fault' is no fault of a trainer", None)
