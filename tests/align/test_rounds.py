"""Parts of a round: rewards that are made up, prompts asked again, a part of a step."""

from types import SimpleNamespace

import numpy as np
import pytest
from fakes import sample
from stepped import config_of

from vime.align.rounds import SHIFT, generate, part_of, prompts_of, spread_rewards, step_data
from vime.train.steps import train_steps
from vime.types import RolloutBatch


def alike():
    """Two groups of two samples each, whose answers and rewards are all equal."""
    return RolloutBatch.from_samples(0, [sample(g, i, reward=1.0) for g in (3, 4) for i in (0, 1)])


def data_of(batch):
    zeros_T = np.zeros(batch.num_tokens, np.float32)
    return train_steps(config_of(), batch, zeros_T, zeros_T)[0]


def test_answers_that_are_alike_have_a_signal_all_the_same():
    assert not data_of(alike()).advantages_T.any()
    zeros_T = np.zeros(alike().num_tokens, np.float32)
    data = step_data(config_of(), alike(), zeros_T, zeros_T)
    of_tokens = data.advantages_T[data.loss_weight_T > 0]
    assert (of_tokens != 0).all()
    assert not data.advantages_T[data.loss_weight_T == 0].any()
    assert of_tokens.mean() == pytest.approx(SHIFT), "equal answers do not cancel"


def test_made_up_rewards_depend_on_the_samples_alone():
    once, again = spread_rewards(alike()), spread_rewards(alike())
    np.testing.assert_array_equal(once.rewards_N, again.rewards_N)
    assert ((once.rewards_N >= 0) & (once.rewards_N < 1)).all()
    assert len(set(once.rewards_N)) == 4
    assert (alike().rewards_N == 1).all()


def test_every_prompt_once():
    assert [(p.group_id, p.token_ids.tolist()) for p in prompts_of(alike())] == [(3, [3, 3]), (4, [4, 4])]


def test_asked_again_with_other_seeds_and_short_answers():
    asked = []

    def answer(prompts, seeds, sampling):
        asked.append((prompts, seeds, sampling))
        return [[sample(p.group_id, i) for i in range(len(s))] for p, s in zip(prompts, seeds, strict=True)]

    bench = SimpleNamespace(config=config_of(), engine=SimpleNamespace(generate=answer))
    batch = generate(bench, alike(), 1)
    generate(bench, alike(), 2, num_prompts=1, longest=16)
    assert (batch.rollout_id, len(batch), batch.rewards_N.tolist()) == (1, 4, [0.0] * 4)
    (prompts, seeds, sampling), (fewer, others, short) = asked
    assert (len(prompts), sampling) == (2, None)
    assert (len(fewer), short) == (1, {"max_response_len": 16})
    assert len({seed for own in (*seeds, *others) for seed in own}) == 6


def test_a_part_of_a_step_is_normalised_by_its_own_tokens():
    data = data_of(spread_rewards(alike()))
    part = part_of(data, 3)
    assert part.sample_ids == ["3/0", "3/1", "4/0"]
    assert (part.offsets.tolist(), len(part.advantages_T)) == ([0, 4, 8, 12], 12)
    assert (data.normalizer, part.normalizer) == (8.0, 6.0)
    assert part_of(data, 9).sample_ids == data.sample_ids
