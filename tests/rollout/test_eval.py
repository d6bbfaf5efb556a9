"""Evaluation over fake engines, and pass@k against hand-computed numbers and brute force."""

import itertools
import math

import pytest
from fakes import FakeEngine, FakeReward, aborted, prompt, sample

from vime.config.schema import Config
from vime.errors import VimeError
from vime.rollout.eval import eval_data, eval_metrics, eval_statistics, evaluate, pass_at_k, powers_of_two
from vime.types import RolloutBatch, RolloutHeader, Status


def config_of(sets=None, **changes):
    plain = {"prompts": ["test.jsonl"], "num_samples_per_prompt": 2, "temperature": 0.25, "sets": sets or {}}
    tree = {
        "model": {"path": "m"},
        "data": {"prompts": ["train.jsonl"], "prompt_key": "q"},
        "rollout": {"sampling": {"max_response_len": 9}},
        "eval": {**plain, **changes},
    }
    return Config.model_validate(tree)


def evaluated(config, engine, version=0, **prompts):
    return evaluate(config, prompts, [engine], FakeReward(), version)


def test_answers_without_finite_log_probs_stay_where_nothing_is_trained():
    """The rollout after it must come to its verdict."""

    def broken(asked, index, seed):
        length = len(asked.token_ids)
        failed = {"status": Status.FAILED, "metadata": {"failure": "not finite"}}
        return sample(asked.group_id, index, prompt_len=length, log_probs=[math.nan, -1.0], **failed)

    config = config_of()
    alone = config.model_copy(update={"debug": config.debug.model_copy(update={"rollout_only": True})})
    found = evaluated(alone, FakeEngine(broken), eval=[prompt(0)])["eval"]
    assert [row["status"] for row in found.rows] == ["failed", "failed"]
    assert math.isnan(eval_statistics(found)["reward"])
    with pytest.raises(VimeError, match="left out: failed 1"):
        evaluated(config, FakeEngine(broken), eval=[prompt(0)])


HARD = {"prompts": ["hard.jsonl"], "top_k": 5, "max_response_len": 3, "num_samples_per_prompt": 3}


def test_same_columns_other_files_no_shuffling():
    data = eval_data(config_of())
    assert (data.prompts, data.prompt_key, data.shuffle) == (["test.jsonl"], "q", False)
    assert eval_data(config_of({"hard": HARD}), "hard").prompts == ["hard.jsonl"]


def test_samples_with_their_own_temperature_and_lasting_seeds():
    engine = FakeEngine()
    prompts = [prompt(g) for g in range(3)]
    first = evaluated(config_of(), engine, eval=prompts)["eval"]
    later = evaluated(config_of(), engine, version=5, eval=prompts)["eval"]
    sent = {"temperature": 0.25, "top_p": 1.0, "top_k": 0, "max_response_len": 9}
    assert [sampling for _, _, sampling in engine.requests] == [sent] * 6
    assert (first.rollout_id, later.rollout_id) == (0, 5)
    assert [r["seed"] for r in first.rows] == [r["seed"] for r in later.rows]
    assert eval_statistics(first) == {
        "reward": 0.5, "best_reward": 1.0, "response_len": 4.0, "truncated_ratio": 0.0,
        "num_samples": 6, "num_prompts": 3, "pass_at_1": 0.5, "pass_at_2": 1.0,
    }  # fmt: skip


def test_each_set_has_its_own_sampling_and_the_record_says_so():
    engine = FakeEngine()
    header = RolloutHeader(
        sampling={"temperature": 1.0, "top_k": 0, "min_p": 0.0},
        sampling_origin={"temperature": "rollout.sampling", "top_k": "default", "min_p": "default"},
    )
    asked = {"eval": [prompt(0)], "hard": [prompt(0), prompt(1)]}
    batches = evaluate(config_of({"hard": HARD}), asked, [engine], FakeReward(), 0, header=header)
    assert [len(batch) for batch in batches.values()] == [2, 6]
    assert engine.requests[1][2] == {"temperature": 0.25, "top_p": 1.0, "top_k": 5, "max_response_len": 3}
    hard = batches["hard"].header
    assert hard.sampling == engine.requests[1][2] | {"min_p": 0.0}
    assert hard.sampling_origin == {
        "temperature": "eval.temperature", "top_k": "eval.sets.hard.top_k", "min_p": "default",
        "max_response_len": "eval.sets.hard.max_response_len",
    }  # fmt: skip


def test_what_gets_no_answer_is_counted_and_not_replaced():
    def only_group_1(prompt, index, seed):
        made = aborted(prompt, index, seed)
        made.status = Status.ABORTED if prompt.group_id == 1 else Status.COMPLETED
        return made

    batch = evaluated(config_of(), FakeEngine(only_group_1), eval=[prompt(g) for g in range(3)])["eval"]
    assert sorted(set(batch.group_ids_N.tolist())) == [0, 2]
    assert batch.header.counts == {"dropped_aborted": 1, "status_completed": 4}
    assert eval_statistics(batch)["dropped/aborted"] == 1
    with pytest.raises(VimeError, match="evaluation: none of 1 prompts got an answer; left out: aborted 1") as nothing:
        evaluated(config_of(), FakeEngine(only_group_1), eval=[prompt(1)])
    assert "see the engine's log" in nothing.value.hint
    with pytest.raises(VimeError, match="evaluation of hard: none of 1 prompts got an answer"):
        evaluated(config_of({"hard": HARD}), FakeEngine(only_group_1), hard=[prompt(1)])


def test_names_of_metrics():
    assert eval_metrics("eval", {"reward": 1.0}) == {"eval/reward": 1.0}
    assert eval_metrics("hard", {"pass_at_2": 1.0}) == {"eval/hard/pass_at_2": 1.0}


def batch_of(*rewards):
    """One prompt per list of rewards."""
    return RolloutBatch.from_samples(
        0, [sample(g, i, reward=reward) for g, group in enumerate(rewards) for i, reward in enumerate(group)]
    )


def test_a_sample_passes_with_the_reward_that_was_set():
    batch = batch_of([0.0, 0.4, 0.6, 1.0], [0.5, 0.0, 0.0, 0.0])
    assert [eval_statistics(batch, 1.0)[f"pass_at_{k}"] for k in (1, 2, 4)] == [1 / 8, 1 / 4, 1 / 2]
    found = eval_statistics(batch, 0.5)  # 2 and 1 of 4: at k = 2, 1 - 1/6 and 1 - 3/6
    assert [found[f"pass_at_{k}"] for k in (1, 2, 4)] == pytest.approx([3 / 8, (5 / 6 + 1 / 2) / 2, 1.0])


def test_k_is_at_most_the_smallest_group():
    found = eval_statistics(batch_of([0.0, 1.0, 0.0, 0.0], [1.0, 0.0]))
    assert [name for name in found if name.startswith("pass")] == ["pass_at_1", "pass_at_2"]
    assert (found["pass_at_1"], found["pass_at_2"]) == (0.375, 0.75)


def test_samples_without_a_reward_count_in_no_mean_and_pass_nothing():
    found = eval_statistics(batch_of([None, 1.0], [None, None]))
    assert (found["reward"], found["best_reward"], found["pass_at_1"]) == (1.0, 1.0, 0.25)
    nothing = eval_statistics(batch_of([None]))
    assert math.isnan(nothing["reward"])
    assert math.isnan(nothing["best_reward"])


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (1, 0, 1, 0.0), (1, 1, 1, 1.0), (4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 2, 2, 5 / 6), (4, 3, 2, 1.0),
        (10, 3, 5, 1 - 21 / 252), (200, 10, 100, 1 - math.comb(190, 100) / math.comb(200, 100)),
    ],
)  # fmt: skip
def test_pass_at_k_by_hand(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, rel=1e-12)


def test_pass_at_k_is_the_share_of_all_choices_that_hold_one_that_passes():
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            choices = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


def test_pass_at_k_of_very_many_samples_is_a_probability():
    """The binomials have thousands of digits."""
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5, abs=1e-9)
    assert pass_at_k(100_000, 50_000, 4096) == 1.0


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_pass_at_k_of_what_cannot_be(n, c, k):
    with pytest.raises(ValueError, match=f"n = {n}, c = {c}, k = {k}"):
        pass_at_k(n, c, k)


def test_powers():
    assert [powers_of_two(n) for n in (1, 2, 3, 6, 8)] == [[1], [1, 2], [1, 2], [1, 2, 4], [1, 2, 4, 8]]
