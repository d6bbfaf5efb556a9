"""What the trainer does is seen at the seams, and the loop does not know."""

import io

import numpy as np
from fakes import FakeTrainer, sample

from vime import loop
from vime.config.schema import Config
from vime.log import Progress
from vime.metrics import Metrics
from vime.observe import Observer
from vime.record.training import rollout_digest
from vime.runs.trace import Trace, TracedTrainer, TracedTransport, layout_of, settings_of
from vime.types import RolloutBatch, TensorEntry, WeightManifest
from vime.weights.manifest import manifest_digest


def config(**sections):
    base = {"model": {"path": "m"}, "data": {"prompts": ["a.jsonl"]}, "log": {"show_samples": 0}}
    rollout = {"rollout_batch_size": 2, "num_samples_per_prompt": 2}
    train = {"num_steps_per_rollout": 2}
    return Config.model_validate({**base, "rollout": rollout, "train": train, "run": {"num_rollouts": 2}, **sections})


class Rollouts:
    def produce(self, rollout_id):
        samples = [sample(2 * rollout_id + g, i, reward=float(i)) for g in (0, 1) for i in (0, 1)]
        return RolloutBatch.from_samples(rollout_id, samples)


class Transport:
    def sync(self, version):
        return WeightManifest(version, "trainer", {"w": TensorEntry("w", (1,), "float32", f"digest {version}")})


def run(settings):
    records, steps = [], []
    trainer = FakeTrainer()

    def losses():
        names = trainer.steps[-1].sample_ids
        return {name: (float(i), 2, i % 2) for i, name in enumerate(names)}

    trace = Trace(settings, losses, records.append, lambda *step: steps.append(step[:2]))
    parts = loop.Parts(Rollouts(), TracedTrainer(trainer, trace), TracedTransport(Transport(), trace))
    observer = Observer(settings, Progress(2, io.StringIO(), False), Metrics([]), None, verify_first_step=False)
    loop.run(settings, parts, observer)
    return records, steps, trainer


def test_one_record_per_rollout_with_everything_the_trainer_did():
    records, steps, trainer = run(config())
    assert [r.rollout_id for r in records] == [0, 1]
    assert steps == [(0, 0), (0, 1), (1, 0), (1, 1)]
    first, batch = records[0], Rollouts().produce(0)
    assert first.log_probs_T.tolist() == batch.rollout_log_probs_T.tolist()
    assert len(first.ref_log_probs_T) == batch.num_tokens
    assert first.advantages_T.tolist() == np.concatenate([s.advantages_T for s in trainer.steps[:2]]).tolist()
    assert first.sample_losses_N.tolist() == [0, 1, 0, 1]
    assert first.dp_ranks_N.tolist() == [0, 1, 0, 1]
    assert [s.grad_norm for s in first.steps] == [1.0, 1.0]
    assert first.weights == {"w": "digest 1"}
    assert first.header.rollout_digest == rollout_digest(batch)


def test_the_weights_trained_from_are_those_of_the_sync_before():
    records, _, _ = run(config())
    before = [manifest_digest(Transport().sync(version)) for version in (0, 1)]
    assert [r.header.weights_before for r in records] == before


def test_a_record_by_a_literal_name_counts_as_the_rollout_of_the_loop(monkeypatch):
    """Its own id is that of the run it was recorded in."""
    produce = Rollouts.produce
    monkeypatch.setattr(Rollouts, "produce", lambda self, rollout_id: produce(self, rollout_id + 7))
    records, steps, _ = run(config())
    assert [r.rollout_id for r in records] == [0, 1]
    assert {rollout_id for rollout_id, _ in steps} == {0, 1}


def test_without_a_reference_model_there_are_no_ref_log_probs():
    records, _, _ = run(config(algo={"log_ref": False}))
    assert len(records[0].ref_log_probs_T) == 0


def test_layout_and_settings_are_told_apart():
    one, other = config(), config(parallel={"tp": 2}, train={"num_steps_per_rollout": 2, "lr": 1e-3})
    assert layout_of(one)["parallel.tp"] == 1
    assert {k for k in layout_of(one) if layout_of(one)[k] != layout_of(other)[k]} == {"parallel.tp"}
    assert {k for k in settings_of(one) if settings_of(one)[k] != settings_of(other)[k]} == {"train.lr"}
    assert "train.max_tokens_per_micro_batch" in layout_of(one)
    assert "train.max_tokens_per_micro_batch" not in settings_of(one)
    assert "rollout.sampling.temperature" in settings_of(one)
