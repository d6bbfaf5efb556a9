"""The steps of the bench over sides that keep books: what is asked of whom, in which order."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fakes import sample

from vime.config.schema import Config
from vime.errors import CheckFailed, UsageError, VimeError
from vime.runs import bench_steps
from vime.types import RolloutBatch, StepStats, TensorEntry, WeightManifest


def config_of(**sections) -> Config:
    base = {
        "model": {"path": "none"},
        "data": {"prompts": ["a.jsonl"]},
        "rollout": {"rollout_batch_size": 2, "num_samples_per_prompt": 2},
    }
    return Config.model_validate({**base, **sections})


class Sides:
    """Trainer and engine in one: every call is a line of ``calls``. ``refuses``: steps raise CheckFailed."""

    def __init__(self, refuses: bool = False, generates_without_weights: bool = False) -> None:
        self.calls: list[str] = []
        self.version, self.saved = 0, 0
        self.refuses, self.has_weights = refuses, True
        self.needs_weights = not generates_without_weights
        self.gap = 0.0
        self.second_is_stale = False

    def log_probs(self, batch, of="policy", how=None):
        self.calls.append(f"log_probs {of}" if how is None else f"log_probs {of} at {how.temperature:g}")
        return np.where(batch.loss_mask_T, np.float32(-0.5), np.float32(0))

    def manifest(self, view="trainer"):
        self.calls.append(f"manifest {view}")
        return self._weights(view)

    def step(self, data):
        self.calls.append("step")
        if self.refuses:
            raise CheckFailed("sample 0/1 of data-parallel rank 1 (0 of 2 tokens)")
        self.version += 1
        return StepStats(0.1, 2.0, 1e-6, 8, 0.1)

    def sample_losses(self):
        return {"0/0": (0.25, 2, 0), "0/1": (-0.15, 2, 1)}

    def write_tensors(self, of, folder, version):
        self.calls.append(f"write {of}")

    def memory(self):
        return {"trainer rank 0": {"rss": 1}}

    def save(self, path, state):
        self.calls.append("save")
        self.saved, self.state = self.version, dict(state)

    def load(self, path):
        self.calls.append("load")
        self.version = self.saved
        return dict(self.state)

    def sync(self):
        self.calls.append("sync")
        self.has_weights = True
        return self._weights("trainer")

    def _weights(self, origin):
        return WeightManifest(self.version, origin, {"w": TensorEntry("w", (1,), "float32", str(self.version))})

    def held(self):
        self.calls.append("held")
        if not self.needs_weights:
            raise UsageError("no worker holds whole tensors")
        stale = WeightManifest(0, "engine-held", {"w": TensorEntry("w", (1,), "float32", "stale")})
        return {
            "engine 0": self._weights("engine-held"),
            "engine 1": stale if self.second_is_stale else self._weights(""),
        }

    def prefix_cache(self):
        return (40, 8)

    def generate(self, prompts, seeds, sampling=None):
        self.calls.append("generate")
        if self.needs_weights and not self.has_weights:
            raise VimeError("engine 0 holds no complete weights\nsync first")
        values = [-0.5 + self.gap] * 2
        return [
            [sample(p.group_id, i, log_probs=values) for i in range(len(own))]
            for p, own in zip(prompts, seeds, strict=True)
        ]

    def score(self, sequences):
        self.calls.append(f"score {len(sequences)}")
        return [np.concatenate([np.zeros(2), np.full(len(s) - 2, -0.5)]).astype(np.float32) for s in sequences]

    def sleep(self, level):
        self.calls.append(f"sleep {level}")
        self.has_weights = False

    def wake(self):
        self.calls.append("wake")


class StepBench(SimpleNamespace):
    @property
    def first(self):
        if "first_" not in self.__dict__:
            self.first_ = bench_steps.first(self)
            self.sides.calls.clear()
        return self.first_

    @property
    def second(self):
        if "second_" not in self.__dict__:
            self.second_ = bench_steps.second(self)
        return self.second_


def bench_of(sides: Sides | None = None, **sections) -> StepBench:
    sides = sides or Sides()
    batch = RolloutBatch.from_samples(0, [sample(g, i, reward=1.0) for g in (0, 1) for i in (0, 1)])
    own_T = np.where(batch.loss_mask_T, np.float32(-0.5), np.float32(0))
    return StepBench(
        config=config_of(**sections), spec=SimpleNamespace(num_layers=4), folder=Path("/scratch"), is_live=True,
        trainer=sides, engine=sides, sync=sides.sync, sides=sides, batch=batch, log_probs_T=own_T,
        ref_log_probs_T=own_T, said=[], say=lambda text: None,
    )  # fmt: skip


def test_the_first_step_has_a_forward_of_its_own_before_it():
    bench = bench_of()
    found = bench_steps.first(bench)
    assert bench.sides.calls == [
        "log_probs policy", "manifest trainer", "step", "write gradients", "manifest trainer",
    ]  # fmt: skip
    assert (found.before.version, found.after.version) == (0, 1)
    assert list(found.memory) == ["generate", "log_probs", "train"]
    assert found.gradients == Path("/scratch/gradients_first")
    assert found.record.sample_losses_N.tolist() == [0.25, -0.15, 0.0, 0.0]
    assert found.record.dp_ranks_N.tolist() == [0, 1, -1, -1]
    assert found.data.advantages_T.any(), "equal rewards are replaced"


def test_a_refused_step_is_a_finding_and_not_an_end():
    found = bench_steps.first(bench_of(Sides(refuses=True)))
    assert "sample 0/1 of data-parallel rank 1" in found.refused
    assert (found.stats.is_skipped, found.gradients) == (True, None)
    assert found.before == found.after


def test_shards_of_gradients_are_left_alone():
    bench = bench_of(parallel={"dp": 2, "distributed_optimizer": True})
    assert bench_steps.first(bench).gradients is None
    assert "write gradients" not in bench.sides.calls


def test_one_optimizer_step_of_several_is_taken():
    bench = bench_of(train={"num_steps_per_rollout": 2})
    found = bench_steps.first(bench)
    assert found.data.sample_ids == ["0/0", "0/1"]
    assert len(found.record.log_probs_T) == int(found.data.offsets[-1])


def test_the_second_round_begins_with_the_sync():
    bench = bench_of()
    found = bench.second
    assert bench.sides.calls[:6] == [
        "sync", "held", "generate", "log_probs policy", "log_probs ref", "log_probs policy",
    ]  # fmt: skip
    assert list(found.memory) == ["sync", "generate", "log_probs", "train"]
    assert (found.cached, found.rescored) == ((0, 0), None)
    assert found.held.origin == "engine-held"
    assert "sleep 2" not in bench.sides.calls


def test_of_several_engines_the_one_with_other_weights_is_told():
    bench = bench_of()
    bench.sides.second_is_stale = True
    assert bench_steps.second(bench).held.origin == "engine 1 holds"


def test_engines_that_share_their_devices_sleep_before_the_second_step():
    bench = bench_of(cluster={"colocate": True})
    bench_steps.second(bench)
    assert bench.sides.calls.index("sleep 2") < bench.sides.calls.index("step")


@pytest.mark.parametrize(("temperature", "forwards"), [(1.0, ["at 1"]), (0.5, ["at 1", "policy"])])
def test_a_wide_gap_is_scored_anew_at_temperature_1(temperature, forwards):
    sides = Sides()
    bench = bench_of(sides, rollout={
        "rollout_batch_size": 2, "num_samples_per_prompt": 2, "sampling": {"temperature": temperature},
    })  # fmt: skip
    assert bench.first is not None
    sides.gap = 0.25
    found = bench_steps.second(bench)
    assert found.rescored == (0.25, 0.0)
    at = sides.calls.index("score 4")
    assert all(call.endswith(how) for call, how in zip(sides.calls[at + 1 :], forwards, strict=False))


def test_a_resume_asks_the_engine_before_and_after_the_sync():
    bench = bench_of()
    assert bench.second is not None
    bench.sides.calls.clear()
    found = bench_steps.resumed(bench)
    calls = bench.sides.calls
    order = [calls.index(each) for each in ("save", "step", "load", "sleep 2", "wake", "generate", "sync")]
    assert order == sorted(order)
    assert calls[calls.index("sync") :].count("generate") == 1
    assert found.refusal == "engine 0 holds no complete weights"
    assert (found.saved.version, found.moved.version, found.loaded.version) == (2, 3, 2)
    assert found.state == found.state_after


def test_an_engine_that_does_not_refuse_is_seen():
    bench = bench_of(Sides(generates_without_weights=True))
    found = bench_steps.resumed(bench)
    assert (found.refusal, found.held) == ("", None)


def test_a_resume_goes_on_where_steps_are_refused():
    found = bench_steps.resumed(bench_of(Sides(refuses=True)))
    assert found.saved == found.moved


def test_one_process_beside_a_layout():
    config = config_of(
        parallel={"dp": 2, "tp": 2, "distributed_optimizer": True},
        debug={"inject": ["loss-scale"]},
        megatron={"ddp": {"overlap_param_gather": True, "overlap_grad_reduce": True}},
    )
    other, title = bench_steps.other_layout(config, bench_steps.first(bench_of()).data)
    assert (other.parallel.world_size, other.parallel.distributed_optimizer, title) == (1, False, "one process")
    assert (other.debug.inject, other.megatron.ddp) == ([], {"overlap_grad_reduce": True})
    assert not other.uses_reference
    assert other.train == config.train


@pytest.mark.parametrize(("budget", "other", "how"), [(64, 1, "every sample alone"), (4, 8, "at most 8 tokens")])
def test_one_process_is_compared_with_itself_packed_otherwise(budget, other, how):
    """Samples of 4 tokens each."""
    config = config_of(train={"max_tokens_per_micro_batch": budget})
    found, title = bench_steps.other_layout(config, bench_steps.first(bench_of()).data)
    assert found.train.max_tokens_per_micro_batch == other
    assert how in title
