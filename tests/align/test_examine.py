"""One rollout, examined as vime does: with the oracle where nothing is trained, and only what is cheap in training."""

import io
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from fakes import sample

from vime.align.coherence import Level
from vime.align.examine import UNITS, Examiner
from vime.config.schema import Config
from vime.data.tokenizer import load_tokenizer
from vime.log import Progress
from vime.metrics import Metrics
from vime.observe import Observer
from vime.types import RolloutBatch, Status, Verdict

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.tiny.make_model import make_tiny_model

PROMPT = {"prompt_text": "<bos>1+1="}


class Unasked:
    def held(self):
        raise AssertionError("the engines were asked for their weights")

    changed_buffers = held


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("examine") / "model", steps=0))


@pytest.fixture(scope="module")
def log_probs(folder):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def call(ids):
        with torch.inference_mode():
            values = torch.log_softmax(model(torch.tensor(ids)[None]).logits[0], -1)
        return np.array([values[t - 1, ids[t]].item() for t in range(1, len(ids))])

    return call


def config_of(folder, is_training=False, **debug):
    debug = {"rollout_only": not is_training, **debug}
    return Config.model_validate(
        {"model": {"path": folder}, "data": {"prompts": ["a.jsonl"]}, "debug": debug, "log": {"show_samples": 0}}
    )


def examiner(folder, is_training=False):
    return Examiner(config_of(folder, is_training), load_tokenizer(folder), engines=Unasked(), stop_ids=(2,))


def spread(log_probs, count=4, shift=0.0):
    """What a random model samples: tokens all over the vocabulary, with its own log-probs."""
    samples = []
    for i in range(count):
        ids = [1, 20, 21, 22, *range(30 + i, 90, 7)]
        own = log_probs(ids)[3:] + shift
        samples.append(sample(1, i, prompt_len=4, response=ids[4:], log_probs=own, reward=0.0, text="x", **PROMPT))
        samples[-1].token_ids[:] = ids
    return RolloutBatch.from_samples(0, samples)


def test_a_random_checkpoint_is_garbled_and_the_engine_is_not_suspected(folder, log_probs):
    found = examiner(folder)(spread(log_probs))
    assert found.level == Level.GARBLED
    assert found.check.verdict == Verdict.FAIL
    assert found.check.cause.startswith("pretrained model: the checkpoint is as good as random; the engine agrees")
    assert found.as_dict()["oracle"] == "tested"
    assert found.as_dict()["signals"]["oracle_gap"] < 1e-6


def test_in_training_only_what_is_cheap_is_measured_and_nothing_fails(folder, log_probs):
    found = examiner(folder, is_training=True)(spread(log_probs))
    assert (found.level, found.check.verdict) == (Level.GARBLED, Verdict.WARN)
    assert found.case.oracle == "only vime rollout asks it"
    assert found.check.cause.startswith("not decided between load, conversion, released buffers and the model itself")


def test_engines_of_somebody_else_are_not_asked(folder, log_probs):
    config = config_of(folder)
    found = Examiner(config, load_tokenizer(folder), stop_ids=(2,))(spread(log_probs, shift=-0.2))
    assert "oracle_gap" in found.as_dict()["signals"]
    assert "(the engines belong to somebody else)" in found.check.cause


@pytest.mark.parametrize(
    ("mode", "reason"), [("raw_logprobs", "tested"), ("logits", "the engines report logits, not log-probs")]
)
def test_servers_that_report_something_else(folder, log_probs, mode, reason):
    servers = Examiner(config_of(folder), load_tokenizer(folder), stop_ids=(2,), log_probs_mode=mode)
    found = servers(spread(log_probs))
    assert found.as_dict()["oracle"] == reason


def test_a_block_for_people(folder, log_probs):
    text = str(examiner(folder)(spread(log_probs)))
    lines = text.splitlines()
    assert lines[0] == "coherence of rollout 0: GARBLED"
    assert lines.index("  worst samples:") + 3 < len(lines)
    assert text.count("    sample 1/") == 3
    assert "  likely: pretrained model" in text
    assert lines[-1].startswith("  try: ")
    assert "0: nonfinite_share" in text
    assert max(map(len, lines)) < 200


def test_every_signal_is_explained(folder, log_probs):
    found = examiner(folder)(spread(log_probs))
    assert set(found.case.numbers()) <= set(UNITS)


def test_an_answer_without_text_shows_its_ids(folder):
    nan = sample(0, response=(0,) * 20, log_probs=(math.nan,) * 20, status=Status.FAILED, **PROMPT)
    found = examiner(folder, is_training=True)(RolloutBatch.from_samples(0, [nan]))
    assert found.worst == ("sample 0/0 failed, log-prob nan: ids " + " ".join(["0"] * 16),)


def observed(folder, is_training, batch):
    said = io.StringIO()
    observer = Observer(config_of(folder, is_training), Progress(1, said, False), Metrics([]), Path)
    observer.examine = examiner(folder, is_training)
    with observer.rollout(0):
        observer.produced(batch)
    return observer, said.getvalue()


def test_a_rollout_says_its_verdict_and_a_run_keeps_the_worst(folder, log_probs):
    observer, said = observed(folder, False, spread(log_probs))
    assert "warning: coherence of rollout 0: GARBLED" in said
    (check,) = observer.verdicts()
    assert (check.name, check.verdict) == ("coherence", Verdict.FAIL)
    clean = [sample(1, i, response=(40,), log_probs=(-0.1,), reward=0.0, text="a", **PROMPT) for i in range(2)]
    observer.examine = examiner(folder, is_training=True)
    with observer.rollout(1):
        observer.produced(RolloutBatch.from_samples(1, clean))
    assert [found.level for found in observer.examinations] == [Level.GARBLED, Level.PASS]
    assert observer.verdicts()[0].verdict == Verdict.FAIL


def test_training_is_silent_about_a_clean_rollout(folder):
    clean = [sample(1, i, response=(40,), log_probs=(-0.1,), reward=0.0, text="a", **PROMPT) for i in range(2)]
    observer, said = observed(folder, True, RolloutBatch.from_samples(0, clean))
    assert "coherence" not in said
    assert [check.verdict for check in observer.verdicts()] == [Verdict.PASS]


def test_training_says_once_what_stays_wrong(folder, log_probs):
    """Reinforcement learning may start from a random model: not the same fifteen lines after every rollout."""
    observer, said = observed(folder, True, spread(log_probs))
    assert "  try: run vime rollout on the same model" in said
    with observer.rollout(1):
        observer.produced(spread(log_probs))
    assert observer.progress.stream.getvalue().removeprefix(said).count("coherence") == 1
    assert "coherence of rollout 0: GARBLED, as before" in observer.progress.stream.getvalue()


def test_an_answer_cannot_move_the_cursor_of_a_terminal(folder):
    told = sample(0, response=(40,), text="a\x1b[2J\x07 b\nc", **PROMPT)
    found = examiner(folder, is_training=True)(RolloutBatch.from_samples(0, [told]))
    assert found.worst == ("sample 0/0 completed, log-prob -0.50: a\ufffd[2J\ufffd b c",)


def test_a_server_may_compute_in_another_precision(folder, log_probs):
    """Its dtype is unknown: what bfloat16 rounds is no suspicion, what is more is."""
    for shift, is_suspected in ((0.1, False), (0.3, True)):
        servers = Examiner(config_of(folder), load_tokenizer(folder), stop_ids=(2,))
        found = servers(spread(log_probs, shift=shift))
        assert any("engine - Hugging Face" in symptom.text for symptom in found.symptoms) == is_suspected


@pytest.mark.parametrize("is_training", [True, False])
def test_a_rollout_with_nothing_to_judge_does_not_pass(folder, is_training):
    nothing = sample(1, 0, prompt_len=2, response=(), status=Status.FAILED, **PROMPT)
    found = examiner(folder, is_training)(RolloutBatch.from_samples(3, [nothing]))
    assert str(found) == "coherence of rollout 3: NOT TESTED: no sampled token in this rollout"
    assert found.line == "coherence of rollout 3: NOT TESTED, no sampled token in this rollout"
    assert found.as_dict()["verdict"] == "NOT TESTED"
