"""Reported faults of trainers, planted on real processes."""

from __future__ import annotations

import case_jobs
import jobs
import numpy as np
import pytest
import random_models
import torch

from vime.weights.checkpoint import read_specs
from vime.weights.manifest import build_manifest, compare
from vime.weights.shm import BufferPlan, SharedBuffer


def test_a_step_without_signal_changes_no_bit(pool, tiny):
    """Case T09: no group has a spread of rewards. Adam's momentum must not move the weights, and it is said."""
    settings = jobs.config(tiny(), algo={"kl_coef": 0.0}, train={"weight_decay": 0.1})
    out = pool.run(1, case_jobs.flat_step, settings)[0]
    assert out["same"]
    assert out["flat"].is_skipped
    assert "every advantage is 0" in out["flat"].skip_reason


def test_a_penalty_is_a_signal_of_its_own(pool, tiny):
    """Case T09: with a KL penalty there is something to learn though no reward differs."""
    out = pool.run(1, case_jobs.flat_step, jobs.config(tiny(), algo={"kl_coef": 0.1}))[0]
    assert not out["flat"].is_skipped
    assert out["flat"].grad_norm > 0
    assert not out["same"]


@pytest.mark.parametrize("parallel", [{"dp": 2}, {"cp": 2}, {"dp": 4}], ids=str)
def test_the_update_does_not_depend_on_the_number_of_ranks(pool, tiny, parallel):
    """Case T15: one trained token on one rank, nine on another: one mean over all tokens, not a mean of means.

    adam_eps = 1 makes Adam's first update proportional to the gradient, so that rounding stays rounding.
    """
    train = {"adam_eps": 1.0, "lr": 0.1, "max_tokens_per_micro_batch": 1000}
    hf = random_models.hf_log_probs(tiny(), [s.token_ids for s in case_jobs.uneven().samples()])
    base = pool.run(1, case_jobs.uneven_step, jobs.config(tiny(), train=train), hf)[0]
    settings = jobs.config(tiny(), train=train, parallel=parallel)
    for out in pool.run(settings.parallel.world_size, case_jobs.uneven_step, settings, hf):
        assert out["stats"].num_tokens == base["stats"].num_tokens == 16
        assert out["stats"].loss == pytest.approx(base["stats"].loss, abs=1e-6)
        assert out["stats"].grad_norm == pytest.approx(base["stats"].grad_norm, abs=1e-6)
        for name, value in base["weights"].items():
            assert np.abs(out["weights"][name] - value).max() <= 1e-6, name
    start = random_models.tensors(tiny())
    assert max(np.abs(start[name] - value).max() for name, value in base["weights"].items()) > 1e-3


@pytest.mark.parametrize("parallel", [{"pp": 2}, {"tp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_what_is_sent_is_the_checkpoint_whatever_the_layout(pool, tiny, parallel):
    """Cases W01, W03, W06, W07: one writer for all stages; every layer once, under its own number; fused rows in the
    order of the file; and none of the rows that pad 131 tokens to 132.
    """
    folder = tiny("qwen3", False, 131)
    buffer = SharedBuffer.create(BufferPlan.of(read_specs(folder)).num_bytes)
    try:
        settings = jobs.config(folder, parallel=parallel)
        sent, *others = pool.run(settings.parallel.world_size, case_jobs.push, settings, buffer.path)
    finally:
        buffer.close()
        buffer.unlink()
    assert others == [None] * len(others)
    tensors = {name: torch.from_numpy(array) for name, array in random_models.tensors(folder).items()}
    assert compare(build_manifest(0, "checkpoint", tensors.items()), sent) == []
    assert sent.tensors["model.embed_tokens.weight"].shape == sent.tensors["lm_head.weight"].shape == (131, 64)
    names = [name for name in sent.tensors if name.endswith("input_layernorm.weight")]
    assert [sent.tensors[name].layer for name in names] == [0, 1, 2, 3]


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_an_infinite_gradient_is_named_and_changes_no_bit(pool, tiny, policy):
    """Case T23: the loss is finite, so no sample is to blame; the one weight is named, and the next step goes on."""
    out = pool.run(1, case_jobs.infinite_gradient, jobs.config(tiny(), train={"nan_policy": policy}))[0]
    found = out["found"]
    if policy == "skip":
        assert found.is_skipped
        assert np.isfinite(found.loss)
        found = found.skip_reason
    assert "gradient not finite in (1) model.layers.1.mlp.down_proj.weight; loss not finite in samples (0)" in found
    assert out["same"]
    assert np.isfinite(out["next"].grad_norm)
    assert not out["next"].is_skipped
