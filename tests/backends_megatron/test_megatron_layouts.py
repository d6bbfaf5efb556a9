"""Every layout gives the numbers of one process, and one process gives those of transformers."""

from __future__ import annotations

import jobs
import numpy as np
import pytest
import random_models

# family, tied, vocabulary (131 needs padding rows under tp 2)
MODELS = [
    ("qwen3", False, 128),
    ("qwen3", True, 131),
    ("qwen2", False, 131),
    ("qwen2", True, 128),
    ("llama", False, 128),
]
LAYOUTS = {
    "tp2": {"tp": 2},
    "tp2 sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "pp2 uneven": {"pp": 2, "num_layers_in_first_stage": 1},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "dp2": {"dp": 2},
    "dp2 sharded": {"dp": 2, "distributed_optimizer": True},
    "cp2": {"cp": 2},
    "tp4": {"tp": 4},  # more ranks than key/value heads
    "tp2 pp2": {"tp": 2, "pp": 2, "sequence_parallel": True},
}
PAIRS = [
    *((model, name) for model in [("qwen3", False, 128), ("qwen3", True, 131)] for name in LAYOUTS if name != "tp4"),
    (("qwen3", False, 128), "tp4"),
    (("qwen2", False, 131), "tp2 sp"),
    (("qwen2", True, 128), "pp2"),
    (("llama", False, 128), "tp2 pp2"),
    (("llama", False, 128), "cp2"),
]


@pytest.fixture(scope="module")
def single(pool, tiny):
    """One process, by model: its outcome and the log-probs of transformers."""
    known = {}

    def get(model) -> tuple[jobs.Outcome, np.ndarray]:
        if model not in known:
            family, is_tied, vocab = model
            folder = tiny(family, is_tied, vocab)
            rollout = jobs.batch(vocab=vocab)
            hf = random_models.hf_log_probs(folder, [s.token_ids for s in rollout.samples()])
            known[model] = pool.run(1, jobs.layout, jobs.config(folder), vocab, hf)[0], hf
        return known[model]

    return get


def _same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not np.array_equal(a[name], b[name])] == []


def _check_start(outcome: jobs.Outcome, folder) -> None:
    """Weights out are weights in by position and name; policy is reference; at rest nothing moves."""
    _same_bits(outcome.before, random_models.tensors(folder))
    assert np.array_equal(outcome.policy, outcome.ref)
    assert outcome.at_rest.grad_norm == 0.0
    assert outcome.at_rest.metrics["train/kl_loss"] == 0.0
    assert not outcome.at_rest.is_skipped
    assert [(s.name, s.shape) for s in outcome.specs] == [(name, a.shape) for name, a in outcome.before.items()]


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_one_process_agrees_with_transformers(single, tiny, model):
    outcome, hf = single(model)
    assert np.abs(outcome.policy - hf).max() < 1e-5
    _check_start(outcome, tiny(*model))
    assert outcome.stats.num_tokens == jobs.batch(vocab=model[2]).loss_mask_T.sum()
    assert 0.1 < outcome.stats.metrics["train/pg_clipfrac"] < 0.9


@pytest.mark.parametrize(("model", "name"), PAIRS, ids=str)
def test_layout_agrees_with_one_process(pool, single, tiny, model, name):
    base, hf = single(model)
    folder = tiny(*model)
    settings = jobs.config(folder, parallel=LAYOUTS[name])
    outcomes = pool.run(settings.parallel.world_size, jobs.layout, settings, model[2], hf)
    for outcome in outcomes:
        _check_start(outcome, folder)
        assert np.abs(outcome.policy - base.policy).max() < 5e-6
        assert outcome.stats.loss == pytest.approx(base.stats.loss, rel=1e-5)
        assert outcome.stats.grad_norm == pytest.approx(base.stats.grad_norm, rel=1e-5)
        assert outcome.stats.num_tokens == base.stats.num_tokens
        assert outcome.stats.metrics == pytest.approx(base.stats.metrics, rel=1e-5, abs=1e-6)  # of terms near 1
        for tensor, gradient in outcome.gradients.items():
            scale = np.linalg.norm(base.gradients[tensor])
            assert np.linalg.norm(gradient - base.gradients[tensor]) <= 1e-5 * scale, tensor
        for tensor, value in outcome.after.items():
            assert np.abs(value - base.after[tensor]).max() < 1e-3, tensor  # Adam turns rounding into a part of lr
        _same_bits(outcome.after, outcomes[0].after)
    assert all(list(outcome.before) == list(outcomes[0].before) for outcome in outcomes)
