"""The loop over fakes of the protocols: resume, epochs, evaluation only, failures."""

import contextlib
import io
from dataclasses import dataclass, field

import numpy as np
import pytest
from fakes import FakeDataSource, FakeEngine, FakeReward, FakeTrainer, FakeTransport

from vime import loop, runs
from vime.config.schema import Config, Data
from vime.data import PromptSource
from vime.errors import VimeError
from vime.log import Progress
from vime.metrics import Metrics
from vime.observe import Observer
from vime.rollout.live import LiveRollouts
from vime.types import RolloutBatch, Sample


def config_of(num_rollouts=3, **sections):
    base = {"model": {"path": "m", "dtype": "float32"}, "data": {"prompts": ["a.jsonl"]}}
    rollout = {"rollout_batch_size": 3, "num_samples_per_prompt": 2, "timeout_seconds": 60.0}
    log = {"show_samples": 0}
    run = {"num_rollouts": num_rollouts}
    return Config.model_validate({**base, "rollout": rollout, "log": log, "run": run, **sections})


@dataclass
class Ran:
    """What one run asked its trainer to learn, and what it said."""

    trainer: FakeTrainer
    transport: FakeTransport = field(default_factory=FakeTransport)
    said: io.StringIO = field(default_factory=io.StringIO)
    evaluated: list[int] = field(default_factory=list)

    def observer(self, config):
        return Observer(config, Progress(9, self.said, False), Metrics([]), None, verify_first_step=False)

    def go(self, config, source, resume=None, trainer=None, evaluate=None):
        """Run ``config``; with ``resume`` (a name under which the trainer saved) as ``vime train --resume`` does."""
        observer = self.observer(config)
        trainer = trainer or self.trainer
        rollouts = LiveRollouts(config, source, [FakeEngine(echo)], FakeReward())
        parts = loop.Parts(rollouts, trainer, self.transport, evaluate, lambda n, s: trainer.save(f"after {n}", s))
        start = runs._restore(parts, resume, observer)
        loop.run(config, parts, observer, start)
        return start


def by_character(texts, add_special_tokens):
    """The smallest tokenizer: one id per character."""
    return {"input_ids": [[ord(c) for c in text] for text in texts]}


def echo(prompt, index, seed):
    """Two tokens to the prompt that was sent."""
    ids = np.concatenate([prompt.token_ids, [seed % 7, index]])
    p = len(prompt.token_ids)
    return Sample(prompt.group_id, index, ids, p, np.arange(p + 2) >= p, np.where(np.arange(p + 2) >= p, -0.5, 0.0))


@pytest.fixture
def ran():
    return Ran(FakeTrainer())


@pytest.fixture
def letters(tmp_path):
    """Prompt sources over three prompts."""
    (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt": "{c}", "label": "1"}}\n' for c in "abc"))

    def make(file="p.jsonl"):
        return PromptSource(Data(prompts=[str(tmp_path / file)], apply_chat_template=False), by_character)

    (tmp_path / "two.jsonl").write_text("".join(f'{{"prompt": "{c}", "label": "1"}}\n' for c in "xy"))
    return make


def asked(trainer):
    """The first token of every sample that was trained on, in order: which prompts were used."""
    return [int(step.token_ids_T[a]) for step in trainer.steps for a in step.offsets[:-1]]


SAVING = {"checkpoint": {"save_interval": 1}}


def test_resume_starts_after_the_checkpoint_and_says_where_from(ran):
    """Case T16: saved after rollout 1, so the next is 2; the engines get version 2 before they generate."""
    ran.go(config_of(2, **SAVING), FakeDataSource())
    again = Ran(ran.trainer)
    assert again.go(config_of(4, **SAVING), FakeDataSource(), resume="after 2") == 2
    assert "resumed from after 2: next is rollout 2" in again.said.getvalue()
    assert again.transport.versions == [2, 3, 4]


@pytest.mark.parametrize("stop_after", [1, 2])
def test_a_resumed_run_asks_what_the_unbroken_one_asks(letters, stop_after):
    """Case T18: 3 prompts, 3 a rollout, so each rollout ends an epoch."""
    whole, broken = Ran(FakeTrainer()), Ran(FakeTrainer())
    whole.go(config_of(3, **SAVING), letters())
    broken.go(config_of(stop_after, **SAVING), letters())
    broken.go(config_of(3, **SAVING), letters(), resume=f"after {stop_after}")
    assert len(asked(whole.trainer)) == 18
    assert asked(broken.trainer) == asked(whole.trainer)
    ids = [[s.sample_ids for s in r.trainer.steps] for r in (whole, broken)]
    assert ids[0] == ids[1]


def test_resume_with_other_prompts_ends_before_anything_is_generated(ran, letters):
    """Case T19: a file of two rows under a cursor that points into one of three."""
    ran.go(config_of(1, **SAVING), letters())
    again = Ran(ran.trainer)
    num_steps = len(ran.trainer.steps)
    with pytest.raises(VimeError, match=r"belongs to other prompts: 3 prompts, .* now 2"):
        again.go(config_of(2, **SAVING), letters("two.jsonl"), resume="after 1")
    assert len(ran.trainer.steps) == num_steps
    assert again.transport.versions == []


def test_a_batch_larger_than_the_data_is_trained_on_whole(ran, letters):
    """Case T29: 3 rows, 8 prompts a rollout: every rollout takes its step."""
    rollout = {"rollout_batch_size": 8, "num_samples_per_prompt": 2}
    ran.go(config_of(2, rollout=rollout), letters())
    assert [len(step.sample_ids) for step in ran.trainer.steps] == [16, 16]


def test_no_rollouts_is_one_evaluation(ran):
    """Case T28: the engines get the weights, the prompts are asked once, nothing is trained or saved."""
    config = config_of(0, eval={"prompts": ["e.jsonl"], "interval": 5}, **SAVING)

    def evaluate(version):
        ran.evaluated.append(version)
        raise StopIteration  # the observer would write the answers to a file

    with contextlib.suppress(StopIteration):
        ran.go(config, FakeDataSource(), evaluate=evaluate)
    assert ran.evaluated == [0]
    assert ran.transport.versions == [0]
    assert ran.trainer.calls == []


def test_without_a_trainer_there_is_one_evaluation(ran):
    """The weights do not change, so that a later one would be the same under another version's name."""
    config = config_of(2, eval={"prompts": ["e.jsonl"], "interval": 1}, debug={"rollout_only": True})
    observer = ran.observer(config)
    observer.evaluated = lambda version, batch: ran.evaluated.append(version)
    rollouts = LiveRollouts(config, FakeDataSource(), [FakeEngine(echo)], FakeReward())
    loop.run(config, loop.Parts(rollouts, evaluate=lambda version: None), observer)
    assert ran.evaluated == [0]


class Failing(FakeTrainer):
    def step(self, data):
        if len(self.steps) == 1:
            raise VimeError("trainer rank 1 failed: out of memory", "lower train.max_tokens_per_micro_batch")
        return super().step(data)


def test_a_trainer_that_fails_ends_the_run_with_its_cause(ran):
    """Case T27: nothing is synced or saved afterwards."""
    trainer = Failing()
    with pytest.raises(VimeError, match=r"^trainer rank 1 failed: out of memory$"):
        ran.go(config_of(3, **SAVING), FakeDataSource(), trainer=trainer)
    assert ran.transport.versions == [0, 1]
    assert list(trainer.saved) == ["after 1"]


def test_training_ids_are_the_ids_of_the_engine(ran):
    """Case R06: nothing between engine and trainer decodes and encodes again; ids and log-probs pass bitwise."""
    seen: list[RolloutBatch] = []

    class Watching(FakeTrainer):
        def log_probs(self, batch, of="policy"):
            seen.append(batch)
            return super().log_probs(batch, of)

    trainer = Watching()
    ran.go(config_of(1), FakeDataSource(), trainer=trainer)
    (step,) = trainer.steps
    assert step.token_ids_T.tobytes() == seen[0].token_ids_T.tobytes()
    assert step.rollout_log_probs_T.tobytes() == seen[0].rollout_log_probs_T.tobytes()
