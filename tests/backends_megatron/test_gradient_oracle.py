"""Loss, gradient norm and every gradient against transformers' autograd, an implementation that shares nothing."""

from __future__ import annotations

import jobs
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from vime.algo.loss import policy_loss


def hf_step(path, algo, data):
    """(loss, {name: gradient}) of the same policy loss under transformers, sequence by sequence."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    total = torch.zeros((), dtype=torch.float64)
    for start, end in zip(data.offsets, data.offsets[1:], strict=False):
        ids = torch.from_numpy(data.token_ids_T[start:end].astype(np.int64))
        log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        old, advantages, ref, weight = (
            torch.from_numpy(column[start + 1 : end])
            for column in (data.old_log_probs_T, data.advantages_T, data.ref_log_probs_T, data.loss_weight_T)
        )
        loss, _ = policy_loss(algo, log_probs, old, advantages, ref)
        total = total + (loss * weight).double().sum() / data.normalizer
    total.backward()
    return total.item(), {name: p.grad.numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("family", "is_tied"), [("qwen3", False), ("qwen2", True), ("llama", False)])
def test_every_gradient_is_that_of_transformers(pool, tiny, family, is_tied):
    path = tiny(family, is_tied)
    settings = jobs.config(path, train={"clip_grad": 1e30})
    ours = pool.run(1, jobs.steps, settings, [1000])[0][0]
    loss, gradients = hf_step(path, settings.algo, jobs.train_data(jobs.batch(), ours["scored"]))
    assert ours["stats"].loss == pytest.approx(loss, rel=1e-5)
    norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients.values()))
    assert ours["stats"].grad_norm == pytest.approx(norm, rel=1e-5)
    assert ours["gradients"].keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert np.linalg.norm(ours["gradients"][name] - gradient) <= 1e-5 * np.linalg.norm(gradient), name
