"""What is documented in vime/metrics.py is written, all of it, by a full turn of the loop and an evaluation."""

import io

import numpy as np
import torch
from fakes import sample

from vime.algo.loss import policy_loss
from vime.config.schema import Algo, Config
from vime.log import Progress
from vime.metrics import METRICS, PREFIXES, JsonlSink, Metrics, read_jsonl
from vime.observe import Observer
from vime.record import read
from vime.types import RolloutBatch, StepStats, TensorEntry, Verification, WeightManifest

CONFIG = Config.model_validate({"model": {"path": "m"}, "data": {"prompts": ["a.jsonl"]}, "log": {"show_samples": 0}})
VERIFIED = Verification(1, "full", num_tensors=1, num_compared=1, num_equal=1, seconds=0.5, sync_seconds=2.0)
MANIFEST = WeightManifest(1, "trainer", {"w": TensorEntry("w", (3, 2), "float32")}, verification=VERIFIED)


def batch(rewards=(0.0, 0.0, 1.0)):
    samples = [sample(i // 2, i % 2, reward=reward) for i, reward in enumerate(rewards)]
    return RolloutBatch.from_samples(0, samples).with_header(counts={"dropped_zero_spread": 2})


def stepped():
    """Statistics under the names that the loss gives them."""
    one = torch.zeros(1)
    stats = policy_loss(Algo(dual_clip=2.0), one, one, one, ref_log_probs_T=one, entropy_T=one)[1]
    return StepStats(0.5, 1.0, 1e-6, 4, 0.1, {f"train/{name}": 0.0 for name in stats})


def observed(tmp_path, *evaluations):
    observer = Observer(
        CONFIG,
        Progress(1, io.StringIO(), False),
        Metrics([JsonlSink(tmp_path / "m.jsonl")]),
        lambda version, name: tmp_path / f"e_{version}_{name}.pt",
    )
    observer.verify_first_step = False
    with observer.rollout(0):
        for phase in ("generate", "log_probs", "train", "sync"):
            with observer.phase(phase):
                pass
        observer.produced(batch())
        zeros = np.zeros(batch().num_tokens, np.float32)
        observer.scored(batch(), zeros, zeros)
        observer.stepped(stepped())
        observer.synced(MANIFEST)
    for version, evaluation in enumerate(evaluations, 1):
        with observer.phase("eval"):
            pass
        observer.evaluated(version, evaluation if isinstance(evaluation, dict) else {"eval": evaluation})
    return observer, read_jsonl(tmp_path / "m.jsonl")


def test_every_documented_metric_is_written(tmp_path):
    _, rows = observed(tmp_path, batch())
    written = {name for row in rows for name in row}
    assert METRICS.keys() - written == set()
    assert [prefix for prefix in PREFIXES if not any(name.startswith(prefix) for name in written)] == []
    assert rows[0]["weights/num_bytes"] == 24
    assert (rows[0]["weights/num_compared"], rows[0]["weights/verify_time"]) == (1, 0.5)
    assert rows[1]["eval/reward"] == 1 / 3
    assert rows[1]["eval/num_prompts"] == 2


def test_prompts_without_an_answer_and_rewards_out_of_time_are_said_of_an_evaluation_too(tmp_path):
    late = sample(0, 0, reward=0.0, metadata={"reward_timeout": True})
    evaluation = RolloutBatch.from_samples(1, [late]).with_header(counts={"dropped_failed": 2})
    observer, _ = observed(tmp_path, evaluation)
    said = observer.progress.stream.getvalue()
    assert "warning: evaluation: groups left out: failed 2" in said
    assert "warning: evaluation: the reward of 1 of 1 samples ran out of time" in said


def test_of_many_evaluations_the_first_and_the_last_are_kept_and_the_scores_of_all(tmp_path):
    all_of_them = [batch([0.0, 0.0, 1.0]), batch([0.0, 1.0, 1.0]), batch([1.0, 1.0, 1.0])]
    observer, _ = observed(tmp_path, *all_of_them)
    assert observer.first_evaluation is all_of_them[0]
    assert observer.last_evaluation is all_of_them[2]
    assert {v: found["reward"] for v, found in observer.evaluations["eval"].items()} == {1: 1 / 3, 2: 2 / 3, 3: 1.0}


def test_every_set_has_its_names_its_record_and_its_line(tmp_path):
    hard = batch([0.0, 0.0, 0.0]).with_header(counts={"dropped_aborted": 3})
    observer, rows = observed(tmp_path, {"eval": batch(), "hard": hard})
    assert (rows[1]["eval/reward"], rows[1]["eval/hard/reward"], rows[1]["eval/hard/dropped/aborted"]) == (1 / 3, 0, 3)
    assert (rows[1]["eval/pass_at_1"], rows[1]["eval/hard/pass_at_1"]) == (0.5, 0)
    assert read(tmp_path / "e_1_hard.pt").header.counts == {"dropped_aborted": 3}
    said = observer.progress.stream.getvalue()
    assert "warning: evaluation of hard: groups left out: aborted 3" in said
    assert "evaluation of hard with weights v1: mean reward 0.000 (3 samples)" in said
    assert "evaluation with weights v1: mean reward 0.333 (3 samples)" in said


def test_the_temperature_of_an_evaluation_is_its_own(tmp_path):
    observer, _ = observed(tmp_path, batch().with_header(sampling={"temperature": 0.0}))
    assert "temperature" not in observer.progress.stream.getvalue()
