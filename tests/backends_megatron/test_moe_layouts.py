"""Experts under every layout: log-probs, weights, gradients, updates are those of one process, and of transformers."""

from __future__ import annotations

from pathlib import Path

import jobs
import numpy as np
import pytest
import random_models
from test_gradient_oracle import hf_step
from test_megatron_layouts import _check_start

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
LAYOUTS = {
    "ep2": {"dp": 2, "ep": 2},
    "ep2 sharded": {"dp": 2, "ep": 2, "distributed_optimizer": True},
    "ep2 of dp4": {"dp": 4, "ep": 2},
    "ep4": {"dp": 4, "ep": 4},
    "dp2": {"dp": 2},
    "pp2": {"pp": 2},
    "pp2 ep2": {"pp": 2, "dp": 2, "ep": 2},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "cp2 ep2": {"cp": 2, "ep": 2},
    "tp2 etp2": {"tp": 2, "sequence_parallel": True},
    "tp2 ep2": {"tp": 2, "ep": 2, "sequence_parallel": True},
    "tp2 etp1": {"tp": 2, "etp": 1, "sequence_parallel": True},
    "dp2 etp2": {"dp": 2, "etp": 2},
    "tp4 etp2": {"tp": 4, "etp": 2, "sequence_parallel": True},
    "tp2 dp2 ep2 etp2": {"tp": 2, "dp": 2, "ep": 2, "etp": 2, "sequence_parallel": True},
    "ep2 etp2 of dp4": {"dp": 4, "ep": 2, "etp": 2},
    "tp2 pp2": {"tp": 2, "pp": 2, "sequence_parallel": True},
}
TIED = ["ep2", "pp2 ep2", "tp2 pp2"]
PAIRS = [*((False, name) for name in LAYOUTS), *((True, name) for name in TIED)]
LIMIT = 2.4e-6  # of float32 log-probs near -5, with experts that multiply 1 to 3 tokens by other kernels


def vocab_of(is_tied: bool) -> int:
    return 131 if is_tied else 128


@pytest.fixture(scope="module")
def folder(tiny):
    return lambda is_tied: tiny("qwen3_moe", is_tied, vocab_of(is_tied), **EXPERTS)


@pytest.fixture(scope="module")
def single(pool, folder):
    """By tying: the outcome of one process and the log-probs of transformers."""
    known = {}

    def get(is_tied: bool) -> tuple[jobs.Outcome, np.ndarray]:
        if is_tied not in known:
            vocab = vocab_of(is_tied)
            hf = random_models.hf_log_probs(folder(is_tied), [s.token_ids for s in jobs.batch(vocab=vocab).samples()])
            known[is_tied] = pool.run(1, jobs.layout, jobs.config(folder(is_tied)), vocab, hf)[0], hf
        return known[is_tied]

    return get


@pytest.mark.parametrize("is_tied", [False, True])
def test_one_process_agrees_with_transformers(single, folder, is_tied):
    outcome, hf = single(is_tied)
    assert np.abs(outcome.policy - hf).max() <= LIMIT
    _check_start(outcome, folder(is_tied))
    assert outcome.describe["family"] == "qwen3_moe"


@pytest.mark.parametrize(("is_tied", "name"), PAIRS, ids=str)
def test_layout_agrees_with_one_process(pool, single, folder, is_tied, name):
    """Case W23: in and out is the identity under every layout; case W10: experts 0..7 once each."""
    base, hf = single(is_tied)
    settings = jobs.config(folder(is_tied), parallel=LAYOUTS[name])
    outcomes = pool.run(settings.parallel.world_size, jobs.layout, settings, vocab_of(is_tied), hf)
    first = outcomes[0]
    _check_start(first, folder(is_tied))
    assert np.abs(first.policy - hf).max() <= LIMIT
    assert first.stats.loss == pytest.approx(base.stats.loss, rel=1e-5)
    assert first.stats.grad_norm == pytest.approx(base.stats.grad_norm, rel=1e-5)
    for tensor, gradient in first.gradients.items():
        scale = np.linalg.norm(base.gradients[tensor])
        assert np.linalg.norm(gradient - base.gradients[tensor]) <= 1e-5 * scale, tensor
    for tensor, value in first.after.items():
        assert np.abs(value - base.after[tensor]).max() < 1e-3, tensor
    for other in outcomes[1:]:
        assert list(other.before) == list(first.before)
        assert all(np.array_equal(value, other.after[tensor]) for tensor, value in first.after.items())


@pytest.mark.parametrize("changes", [{}, {"norm_topk_prob": False}, {"num_experts_per_tok": 3}], ids=str)
def test_every_gradient_is_that_of_transformers(pool, tiny, changes):
    path = tiny("qwen3_moe", False, **{**EXPERTS, **changes})
    settings = jobs.config(path, train={"clip_grad": 1e30})
    ours = pool.run(1, jobs.steps, settings, [1000])[0][0]
    loss, fused = hf_step(path, settings.algo, jobs.train_data(jobs.batch(), ours["scored"]))
    gradients = per_expert(fused)
    assert ours["stats"].loss == pytest.approx(loss, rel=1e-5)
    assert ours["gradients"].keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert np.linalg.norm(ours["gradients"][name] - gradient) <= 1e-5 * np.linalg.norm(gradient), name


def per_expert(named: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """transformers holds all experts of a layer in two tensors; checkpoints have three for each."""
    out = {}
    for name, value in named.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(value):
                for part, half in zip(("gate", "up"), np.split(both, 2), strict=True):
                    out[name.replace("gate_up_proj", f"{expert}.{part}_proj.weight")] = half
        elif name.endswith("experts.down_proj"):
            for expert, one in enumerate(value):
                out[name.replace("down_proj", f"{expert}.down_proj.weight")] = one
        else:
            out[name] = value
    return out


def numbered(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Each expert's tensors are filled with its number, plus 100 times its layer."""
    out = dict(tensors)
    for name, value in tensors.items():
        if ".experts." in name:
            layer, expert = int(name.split(".")[2]), int(name.split(".")[5])
            out[name] = np.full_like(value, 100 * layer + expert)
    return out


@pytest.mark.parametrize("name", ["ep2", "ep4", "pp2 ep2", "tp2 ep2"])
def test_each_expert_comes_back_under_its_own_number(pool, folder, tmp_path, name):
    """Case W10: with expert parallelism rank 1 must not hold experts 0..k again, also with one stage."""
    path = random_models.rewrite(folder(False), tmp_path / "numbered", numbered)
    settings = jobs.config(path, parallel=LAYOUTS[name])
    exported = pool.run(settings.parallel.world_size, jobs.held_and_exported, settings)
    numbers = {n: set(np.unique(value)) for n, value in exported[0]["exported"].items() if ".experts." in n}
    assert len(numbers) == 4 * 8 * 3
    assert all(found == {100.0 * int(n.split(".")[2]) + int(n.split(".")[5])} for n, found in numbers.items())
    by_rank = [sorted({int(n.rpartition("weight")[2]) for n in one["held"] if ".experts." in n}) for one in exported]
    assert sorted({expert for experts in by_rank for expert in experts}) == list(range(8))
    assert {len(experts) for experts in by_rank} == {8 // settings.parallel.ep}


def test_what_experts_cannot_do_is_refused(pool, folder, tmp_path: Path):
    def said(**options):
        return pool.run(1, jobs.refusal, jobs.config(folder(False), **options))[0]

    assert "parallel.ep x etp = 2 x 1: does not divide" in said(parallel={"ep": 2})
    assert "needs parallel.sequence_parallel = true" in said(parallel={"tp": 2})
    for key, value in {
        "moe_aux_loss_coeff": 0.01,
        "moe_router_enable_expert_bias": True,
        "moe_expert_capacity_factor": 1.0,
    }.items():
        assert f"megatron.transformer.{key} = {value}" in said(megatron={"transformer": {key: value}})


def test_bfloat16_keeps_policy_and_reference_bitwise(pool, folder, single):
    hf = single(False)[1]
    settings = jobs.config(folder(False), model={"dtype": "bfloat16"}, parallel={"dp": 2, "ep": 2})
    outcome = pool.run(2, jobs.layout, settings, 128, hf)[0]
    assert np.array_equal(outcome.policy, outcome.ref)
    assert outcome.at_rest.metrics["train/kl_loss"] == 0.0
    assert np.abs(outcome.policy - hf).mean() < 0.1  # a token near a tie goes to another expert


def test_nothing_depends_on_packing_or_micro_batches(pool, folder):
    """An expert gets 1 to 3 tokens of a small micro-batch, and multiplies them as it does those of a large one."""
    first, *others = pool.run(1, jobs.steps, jobs.config(folder(False)), [1000, 70, 20, 1])[0]
    for other in others:
        assert np.array_equal(first["scored"], other["scored"])
        assert other["at_rest"].grad_norm == 0.0
        assert other["stats"].loss == pytest.approx(first["stats"].loss, rel=1e-6)
        for name, gradient in first["gradients"].items():
            assert np.linalg.norm(other["gradients"][name] - gradient) <= 2e-6 * np.linalg.norm(gradient), name
