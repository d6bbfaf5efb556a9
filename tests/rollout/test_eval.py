"""Evaluation over fake engines."""

import pytest
from fakes import FakeEngine, FakeReward, aborted, prompt

from vime.config.schema import Config
from vime.errors import VimeError
from vime.rollout.eval import eval_data, eval_statistics, evaluate
from vime.types import Status


def config_of(**changes):
    tree = {
        "model": {"path": "m"},
        "data": {"prompts": ["train.jsonl"], "prompt_key": "q"},
        "eval": {"prompts": ["test.jsonl"], "num_samples_per_prompt": 2, "temperature": 0.25, **changes},
    }
    return Config.model_validate(tree)


def test_same_columns_other_files_no_shuffling():
    data = eval_data(config_of())
    assert (data.prompts, data.prompt_key, data.shuffle) == (["test.jsonl"], "q", False)


def test_samples_with_their_own_temperature_and_lasting_seeds():
    engine = FakeEngine()
    prompts = [prompt(g) for g in range(3)]
    first = evaluate(config_of(), prompts, [engine], FakeReward(), version=0)
    later = evaluate(config_of(), prompts, [engine], FakeReward(), version=5)
    assert {str(sampling) for _, _, sampling in engine.requests} == {"{'temperature': 0.25}"}
    assert (first.rollout_id, later.rollout_id) == (0, 5)
    assert [r["seed"] for r in first.rows] == [r["seed"] for r in later.rows]
    assert eval_statistics(first) == {
        "eval/reward": 0.5, "eval/best_reward": 1.0, "eval/response_len": 4.0, "eval/truncated_ratio": 0.0,
        "eval/num_samples": 6, "eval/num_prompts": 3,
    }  # fmt: skip


def test_what_gets_no_answer_is_counted_and_not_replaced():
    def only_group_1(prompt, index, seed):
        made = aborted(prompt, index, seed)
        made.status = Status.ABORTED if prompt.group_id == 1 else Status.COMPLETED
        return made

    batch = evaluate(config_of(), [prompt(g) for g in range(3)], [FakeEngine(only_group_1)], FakeReward(), version=0)
    assert sorted(set(batch.group_ids_N.tolist())) == [0, 2]
    assert batch.header.counts == {"dropped_aborted": 1, "status_completed": 4}
    with pytest.raises(VimeError, match="no prompt got an answer"):
        evaluate(config_of(), [prompt(1)], [FakeEngine(only_group_1)], FakeReward(), version=0)
