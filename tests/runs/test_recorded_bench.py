"""Which samples of a record the walk takes, and which records it refuses."""

import numpy as np
import pytest

from examples.tiny.make_model import make_tiny_model
from vime.config.schema import Config
from vime.errors import UsageError
from vime.record import write
from vime.runs.recorded_bench import recorded_rollout
from vime.types import RolloutBatch, Sample, Status


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("recorded") / "model", steps=0)


def config(model, prompts=2, samples=2):
    rollout = {"rollout_batch_size": prompts, "num_samples_per_prompt": samples}
    return Config.model_validate({"model": {"path": str(model)}, "data": {"prompts": ["p"]}, "rollout": rollout})


def sample(group, index, status=Status.COMPLETED):
    mask = np.array([False, True, True])
    return Sample(group, index, np.array([1, 5, 2]), 1, mask, np.where(mask, -1.0, 0.0), status=status)


def kept(folder, model, samples, **size):
    write(folder / "data_3.pt", RolloutBatch.from_samples(3, samples))
    _, batch = recorded_rollout(config(model, **size), str(folder / "data_{rollout_id}.pt"), "3")
    return [one.name for one in batch.samples()]


def test_the_first_groups_and_samples_as_many_as_the_walk_has(model, tmp_path):
    every = [sample(group, index) for group in (7, 8, 9) for index in range(3)]
    assert kept(tmp_path, model, every) == ["sample 7/0", "sample 7/1", "sample 8/0", "sample 8/1"]


def test_what_nobody_trains_on_is_left_out(model, tmp_path):
    every = [sample(7, 0, Status.FAILED), sample(7, 1), sample(8, 0, Status.ABORTED), sample(8, 1, Status.TRUNCATED)]
    assert kept(tmp_path, model, every) == ["sample 7/1", "sample 8/1"]
    with pytest.raises(UsageError, match="no sample is completed or truncated"):
        kept(tmp_path / "none", model, every[:1])


def test_a_record_that_is_not_there_is_named(model, tmp_path):
    with pytest.raises(UsageError, match="there is no file for any id"):
        recorded_rollout(config(model), str(tmp_path / "data_{rollout_id}.pt"))
