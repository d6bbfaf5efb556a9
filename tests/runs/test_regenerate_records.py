"""What `vime replay --regenerate` asks, of whom, with which options, and what it leaves out. Engines are scripted."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
from fakes import FakeEngine, answer, sample

from vime.config.schema import Config
from vime.errors import PromptTooLong, UsageError, VimeError
from vime.log import Progress
from vime.record.writer import write
from vime.rollout.regenerate import Regeneration, judge
from vime.runs.regenerate import _all, _as_recorded, _overridden, _questions, _read, _weights_differ
from vime.types import RolloutBatch, RolloutHeader, Sample, Status, Verdict

OPTIONS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_response_len": 4, "stop_token_ids": [1]}


class Digits:
    def decode(self, ids):
        return " ".join(map(str, ids))


def config_of(**rollout) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "data": {"prompts": ["p.jsonl"]}, "rollout": rollout})


def recorded(group_id: int, index: int, seed: int, **changes) -> Sample:
    """What FakeEngine answers to that seed."""
    response = [int(d) for d in str(seed)[-4:]]
    return sample(group_id, index, response=response, seed=seed, text=str(seed), **changes)


@pytest.fixture
def record_of(tmp_path: Path):
    def make(*samples: Sample, rollout_id: int = 0, sampling=OPTIONS, overrides=None, **header):
        path = tmp_path / f"data_{rollout_id}.pt"
        write(
            path,
            RolloutBatch.from_samples(rollout_id, samples, RolloutHeader(sampling=sampling, **header)),
            overwrite=True,
        )
        return _read(path, "", overrides or {})

    return make


def asked_again(engines, *records, timeout_seconds: float = 30.0) -> Regeneration:
    questions, skipped = _questions(records)
    with Progress(stream=io.StringIO()).phase("generate", len(questions)) as phase:
        config = config_of(timeout_seconds=timeout_seconds)
        matches = asyncio.run(_all(config, questions, engines, Digits(), phase, skipped))
    return Regeneration(matches, dict(skipped))


def test_every_sample_is_asked_with_its_seed_and_the_options_of_its_record(record_of) -> None:
    first = record_of(*(recorded(g, i, 1000 + 10 * g + i) for g in range(2) for i in range(2)))
    second = record_of(recorded(0, 3, 2222), rollout_id=1, sampling=OPTIONS | {"temperature": 0.5})
    engine, other = FakeEngine(), FakeEngine()
    found = asked_again([engine, other], first, second)
    assert (len(found.matches), found.num_identical, found.not_tested) == (5, 5, {})
    assert engine.requests == [(0, [1000, 1001], OPTIONS), (0, [2222], OPTIONS | {"temperature": 0.5})]
    assert other.requests == [(1, [1010, 1011], OPTIONS)]
    assert [(m.rollout_id, m.name) for m in found.matches][-1] == (1, "sample 0/3")
    assert judge(found, 1e-5, "").verdict is Verdict.PASS


def test_an_answer_to_another_seed_is_caught(record_of) -> None:
    record = record_of(*(recorded(0, i, 1234 + i) for i in range(3)))
    found = asked_again([FakeEngine(lambda prompt, index, seed: answer(prompt, index, seed + 1))], record)
    assert found.num_identical == 0
    assert judge(found, 1e-5, "").verdict is Verdict.FAIL


def test_samples_of_one_group_with_other_prompts_are_asked_apart(record_of) -> None:
    record = record_of(recorded(0, 0, 1111, prompt_len=2), recorded(0, 1, 1112, prompt_len=3))
    engine = FakeEngine()
    assert asked_again([engine], record).num_identical == 2
    assert [seeds for _, seeds, _ in engine.requests] == [[1111], [1112]]


def test_what_cannot_be_asked_or_gets_no_answer_is_counted(record_of) -> None:
    turns = recorded(0, 1, 1112, metadata={"num_turns": 2})
    record = record_of(recorded(0, 0, 1111), turns, recorded(1, 0, 1113, status=Status.ABORTED), recorded(2, 0, 1114))

    def script(prompt, index, seed):
        if prompt.group_id == 2:
            raise PromptTooLong("too long")
        return answer(prompt, index, seed)

    found = asked_again([FakeEngine(script)], record)
    assert (len(found.matches), found.num_identical) == (1, 1)
    assert found.not_tested == {
        "several turns: its tokens are not one answer to one prompt": 1,
        "status aborted": 1,
        "the prompt is over the context of this engine": 1,
    }


def test_a_second_generation_that_was_aborted_is_not_compared(record_of) -> None:
    def script(prompt, index, seed):
        made = answer(prompt, index, seed)
        made.status = Status.ABORTED if index == 1 else made.status
        return made

    found = asked_again([FakeEngine(script)], record_of(*(recorded(0, i, 1111 + i) for i in range(3))))
    assert [m.name for m in found.matches] == ["sample 0/0", "sample 0/2"]
    assert found.not_tested == {"the second generation was aborted": 1}


def test_an_engine_that_fails_or_hangs_ends_it(record_of) -> None:
    record = record_of(recorded(0, 0, 1111), recorded(1, 0, 1112))

    def dead(prompt, index, seed):
        raise VimeError("engine 0 is dead")

    slow = FakeEngine(dead, delays={1: 60.0})
    with pytest.raises(VimeError, match="engine 0 is dead"):
        asked_again([slow], record)
    assert slow.cancelled == [1]
    with pytest.raises(VimeError, match=r"rollout\.timeout_seconds=0\.1: 1 of 2 prompts pending") as late:
        asked_again([FakeEngine(delays={1: 60.0})], record, timeout_seconds=0.1)
    assert "--ids" in late.value.hint


def test_records_without_options_or_with_impossible_ones_are_refused(record_of) -> None:
    with pytest.raises(
        UsageError, match=r"data_0\.pt cannot be generated again: it holds neither .* nor seeds"
    ) as bare:
        record_of(recorded(0, 0, 1111), sampling={})
    assert "vime rollout --save" in bare.value.hint
    with pytest.raises(UsageError, match=r"cannot be generated again: sampling\.top_p = 7\.0: "):
        record_of(recorded(0, 0, 1111), sampling=OPTIONS | {"top_p": 7.0})


def test_the_command_line_wins_and_is_a_known_difference_of_any_record(record_of) -> None:
    given = {"temperature": 0.5}
    first = record_of(recorded(0, 0, 1111), sampling=OPTIONS | {"temperature": 0.5}, overrides=given)
    second = record_of(recorded(0, 0, 1112), rollout_id=1, overrides=given)
    assert second.sampling == OPTIONS | {"temperature": 0.5}
    (known,) = _overridden([first, second], given)
    assert known.text == "rollout.sampling.temperature = 0.5 (command line), recorded 1.0"
    assert known.is_asked
    assert list(_overridden([first], given)) == []


def test_the_engine_has_room_for_the_longest_answers_of_all_records(record_of) -> None:
    first = record_of(recorded(0, 0, 1111))
    second = record_of(recorded(0, 0, 1112), rollout_id=1, sampling=OPTIONS | {"max_response_len": 99})
    found = _as_recorded(config_of(), [first, second])
    assert (found.rollout.sampling.max_response_len, found.rollout.sampling.stop_token_ids) == (99, [1])
    assert found.longest_response == 99


def test_trained_weights_without_a_digest_are_a_known_difference(record_of) -> None:
    from vime.backends.vllm.remote import RemoteEngines

    say, records = Progress(stream=io.StringIO()), [record_of(recorded(0, 0, 1111), weight_version=3)]
    (known,) = _weights_differ(records, RemoteEngines(config_of(), None), say)
    assert known.text == "the record's weights are v3, trained; model.path is taken for them"
    assert list(_weights_differ([record_of(recorded(0, 0, 1111))], RemoteEngines(config_of(), None), say)) == []
