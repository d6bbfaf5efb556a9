"""Losses by sample, and the faults of the trainer that the comparison of replays is there for."""

from __future__ import annotations

from types import SimpleNamespace

import fault_jobs
import jobs
import numpy as np
import pytest

from vime.train.packing import pack


def losses(answers):
    """Sample -> (loss, tokens, dp rank), parts of context-parallel ranks added up."""
    found = {}
    for answer in answers:
        dp_rank, samples = answer["losses"] or (0, {})
        for name, (loss, tokens) in samples.items():
            before = found.get(name, (0.0, 0, dp_rank))
            found[name] = (before[0] + loss, before[1] + tokens, dp_rank)
    return found


@pytest.fixture(scope="module")
def one(pool, tiny):
    return pool.run(1, fault_jobs.step, jobs.config(tiny()))


@pytest.mark.parametrize("parallel", [{}, {"dp": 2}, {"tp": 2, "pp": 2}, {"cp": 2}], ids=str)
def test_losses_of_the_samples_add_up_to_the_loss_in_every_layout(pool, tiny, one, parallel):
    settings = jobs.config(tiny(), parallel=parallel)
    answers = pool.run(settings.parallel.world_size, fault_jobs.step, settings)
    found, single, rollout = losses(answers), losses(one), jobs.batch()
    assert sum(loss for loss, _, _ in found.values()) == pytest.approx(answers[0]["stats"].loss, rel=1e-6)
    trained = np.add.reduceat(rollout.loss_mask_T, rollout.offsets[:-1], dtype=int)
    assert [found[f"{group}/0"][1] for group in range(len(rollout))] == trained.tolist()
    for name, (loss, _, _) in single.items():
        assert found[name][0] == pytest.approx(loss, rel=1e-5, abs=1e-8)
    assert {rank for _, _, rank in found.values()} == set(range(settings.parallel.dp))


def test_loss_scale_doubles_every_loss_of_rank_1_alone(pool, tiny, one):
    settings = jobs.config(tiny(), parallel={"dp": 2}, debug={"inject": ["loss-scale"]})
    found, single = losses(pool.run(2, fault_jobs.step, settings)), losses(one)
    for name, (loss, _, rank) in found.items():
        assert loss == pytest.approx((1 + rank) * single[name][0], rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("rank", [0, 1])
def test_two_faults_of_one_step_are_both_planted_and_in_rank_1_alone(monkeypatch, rank):
    from vime.backends.megatron import faults

    monkeypatch.setattr(faults.parallel, "dp_rank", lambda: rank)
    learner = SimpleNamespace(damage=list)
    faults.plant_in_steps(learner, ["dropped-sample", "loss-scale"])
    rollout = jobs.batch()
    whole = pack(jobs.train_data(rollout, rollout.rollout_log_probs_T), np.arange(2))
    (found,) = learner.damage([whole])
    first, second = (slice(*whole.cu_seqlens[i : i + 2]) for i in (0, 1))
    assert found.sample_ids == whole.sample_ids[: 2 - rank]
    assert found.loss_weight_T[first].tolist() == ((1 + rank) * whole.loss_weight_T[first]).tolist()
    assert found.loss_weight_T[second].tolist() == ((1 - rank) * whole.loss_weight_T[second]).tolist()


def test_shard_order_exchanges_the_shards_of_one_matrix(pool, tiny, one):
    settings = jobs.config(tiny(), parallel={"tp": 2}, debug={"inject": ["shard-order"]})
    mine, right = pool.run(2, fault_jobs.step, settings)[0]["weights"], one[0]["weights"]
    wrong = [name for name in right if not np.array_equal(mine[name], right[name])]
    assert wrong == ["model.layers.0.self_attn.o_proj.weight"]
    left, other = np.split(right[wrong[0]], 2, 1)
    assert np.array_equal(mine[wrong[0]], np.concatenate([other, left], 1))


@pytest.mark.parametrize("parallel", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_a_sample_that_is_not_trained_on_is_named_with_its_rank(pool, tiny, parallel):
    """Every rank says the same, so that none waits for another."""
    settings = jobs.config(tiny(), parallel=parallel, debug={"inject": ["dropped-sample"]})
    said = {answer["failed"] for answer in pool.run(settings.parallel.world_size, fault_jobs.step, settings)}
    (message,) = said
    assert message.startswith("optimizer step 1: not trained on as the data says: (1) sample ")
    assert "of data-parallel rank 1 (0 of " in message


def test_gradients_on_disk_are_the_gradients(pool, tiny, tmp_path):
    settings = jobs.config(tiny(), parallel={"tp": 2})
    assert pool.run(2, fault_jobs.tensors_on_disk, settings, str(tmp_path / "g")) == [True, True]
    assert len(list((tmp_path / "g").iterdir())) > 1
