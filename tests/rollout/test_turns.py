"""Samples of several turns: every token is the engine's own, and every answer is to exactly what was sent."""

import asyncio

import numpy as np
import pytest
from fakes import FakeDataSource, FakeEngine, FakeReward, prompt
from hypothesis import given
from hypothesis import strategies as st

from vime.config.schema import Config
from vime.errors import PromptTooLong, VimeError
from vime.rollout.live import LiveRollouts
from vime.rollout.turns import Turns, turn_seed
from vime.types import Sample, Status

STOP = 1


def answer_to(prompt, response, log_probs=None, **changes):
    """The engine's answer to ``prompt``: its tokens, then ``response``."""
    p, n = len(prompt.token_ids), len(response)
    return Sample(
        group_id=prompt.group_id,
        index=0,
        token_ids=np.concatenate([prompt.token_ids, np.asarray(response, np.int32)]),
        prompt_len=p,
        loss_mask=np.array([False] * p + [True] * n),
        rollout_log_probs=np.array([0.0] * p + list(log_probs or [-0.5] * n)),
        **changes,
    )


class Words:
    """Token i reads "i "; the inverse of ``encode`` for numbers without leading zeros alone, as tokenizers are."""

    def encode(self, text, add_special_tokens=True):
        return ([2] if add_special_tokens else []) + [int(word) for word in text.split()]

    def decode(self, ids, skip_special_tokens):
        return "".join(f"{i} " for i in ids)


def test_a_sample_of_two_turns():
    turns = Turns(prompt(3), seed=9, index=2, tokenizer=Words())
    first, second = [40, 41, STOP], [50, STOP]
    turns.add(answer_to(turns.prompt, first, [-0.1, -0.2, -0.3], text="a", weight_version_min=4, weight_version_max=5))
    turns.observe("60 61")
    turns.observe([62])
    assert turns.prompt.token_ids.tolist() == [3, 3, 40, 41, STOP, 60, 61, 62]
    assert (turns.prompt.group_id, turns.prompt.label) == (3, "1")
    turns.add(answer_to(turns.prompt, second, [-0.4, -0.5], text="b", weight_version_min=5, weight_version_max=6))
    found = turns.sample()
    assert found.token_ids.tolist() == [3, 3, 40, 41, STOP, 60, 61, 62, 50, STOP]  # stop ids of inner turns stay
    assert found.loss_mask.tolist() == [False] * 2 + [True] * 3 + [False] * 3 + [True] * 2
    assert found.rollout_log_probs == pytest.approx([0, 0, -0.1, -0.2, -0.3, 0, 0, 0, -0.4, -0.5])
    assert (found.group_id, found.index, found.prompt_len, found.seed) == (3, 2, 2, 9)
    assert (found.weight_version_min, found.weight_version_max) == (4, 6)
    assert (found.text, found.status, found.prompt_text) == ("a60 6162 b", Status.COMPLETED, "prompt 3")
    assert found.metadata == {"num_turns": 2}
    assert turns.sample(text="b").text == "b"


def test_one_turn_is_the_plain_generation():
    engine = FakeEngine()
    turns = Turns(prompt(3), seed=1234567, index=1)
    asyncio.run(turns.ask(engine, {}))
    found, (plain,) = turns.sample(), asyncio.run(engine.generate(prompt(3), [1234567]))
    assert found.token_ids.tolist() == plain.token_ids.tolist()
    assert found.rollout_log_probs.tolist() == plain.rollout_log_probs.tolist()
    assert engine.requests[0] == engine.requests[1]


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=4), st.lists(st.integers(0, 99))), max_size=5)
)
def test_tokens_are_those_of_the_engine_and_the_mask_is_true_on_them_alone(rounds):
    """Case R06."""
    turns = Turns(prompt(0, 3), seed=0, index=0)
    ids, mask, cut = [0, 0, 0], [False] * 3, 3
    for response, observed in rounds:
        turns.add(answer_to(turns.prompt, response))
        turns.observe(observed)
        ids, mask = ids + response + observed, mask + [True] * len(response) + [False] * len(observed)
        cut = len(ids) - len(observed)
        assert turns.token_ids.tolist() == ids
    if rounds:
        found = turns.sample()
        assert found.token_ids.tolist() == ids[:cut]  # what nothing was sampled on is left out
        assert found.loss_mask.tolist() == mask[:cut]
        assert (found.rollout_log_probs != 0).tolist() == mask[:cut]


@pytest.mark.parametrize(
    ("tokens", "what"),
    [
        ([3, 3, 40, STOP, 61], r"5 prompt tokens are not the 5 .* position 4 on, token 61 where token 60 was sent"),
        ([3, 3, 41, STOP, 60], r".* from position 2 on, token 41 where token 40 was sent"),
        ([3, 3, 40, STOP], r"4 prompt tokens are not the 5 .* position 4 on, nothing where token 60 was sent"),
        ([3, 3, 40, STOP, 60, 60], r"6 prompt tokens are not the 5 .* position 5 on, token 60 where nothing was sent"),
    ],
)
def test_an_answer_to_something_else_is_refused(tokens, what):
    """The prefix property, at every turn: re-encoded, cut or padded prompts do not pass."""
    turns = Turns(prompt(3), seed=0, index=1)
    turns.add(answer_to(turns.prompt, [40, STOP]))
    turns.observe([60])
    other = prompt(3).__class__(3, np.array(tokens, dtype=np.int32), "")
    with pytest.raises(VimeError, match=rf"^sample 3/1, turn 1: the answer's {what}"):
        turns.add(answer_to(other, [7]))


def test_other_groups_and_unsampled_tokens_are_refused():
    turns = Turns(prompt(3), seed=0, index=1)
    with pytest.raises(VimeError, match="sample 3/1, turn 0: the answer belongs to group 4, not to group 3"):
        turns.add(answer_to(prompt(4), [7]))
    answer = answer_to(turns.prompt, [7, 8])
    answer.loss_mask[3] = False
    with pytest.raises(VimeError, match="sample 3/1, turn 0: token 3 of the answer was not sampled by the policy"):
        turns.add(answer)
    with pytest.raises(VimeError, match="sample 3/1, turn 0: text was observed, and there is no tokenizer"):
        turns.observe("9")
    with pytest.raises(VimeError, match="sample 3/1: no answer was added"):
        turns.sample()


def test_every_turn_has_its_own_seed():
    seeds = {turn_seed(seed, turn) for seed in range(20) for turn in range(20)}
    assert len(seeds) == 400
    assert turn_seed(7, 0) == 7
    assert turn_seed(7, 1) == turn_seed(7, 1)
    assert all(0 <= seed < 2**53 for seed in seeds)


class Scripted(FakeEngine):
    """Answers with ``answers`` in turn, cut to max_response_len; refuses prompts of more than ``context`` tokens."""

    def __init__(self, *answers, context=1000):
        super().__init__()
        self.answers, self.context = list(answers), context

    async def generate(self, prompt, seeds, sampling=None):
        self.requests.append((prompt.group_id, list(seeds), dict(sampling or {})))
        if len(prompt.token_ids) >= self.context:
            raise PromptTooLong(f"{len(prompt.token_ids)} tokens")
        response, status = self.answers.pop(0)
        return [answer_to(prompt, response[: sampling["max_response_len"]], status=status)]


def run(turns, engine, observed=(60, 61), **sampling):
    async def loop():
        while await turns.ask(engine, {"max_response_len": 100, **sampling}) is not None:
            turns.observe(observed)
        return turns.sample()

    return asyncio.run(loop())


def test_the_length_limit_is_for_the_whole_response():
    engine = Scripted(*[([40, 41, STOP], Status.COMPLETED)] * 9)
    found = run(Turns(prompt(3), 0, 0, max_response_len=9), engine, min_response_len=2)
    assert [r[2] for r in engine.requests] == [  # then 3 + 2 + 3 + 2 are over 9
        {"max_response_len": 9, "min_response_len": 2},
        {"max_response_len": 4, "min_response_len": 2},
    ]
    assert (found.response_len, found.status) == (8, Status.TRUNCATED)  # not the observation nobody answered
    assert found.loss_mask[-1]
    assert engine.requests[1][1] == [turn_seed(0, 1)]


def test_only_the_limit_of_the_length_is_added_to_the_options():
    """What the call leaves out is as in rollout.sampling, min_response_len too."""
    engine = FakeEngine()
    asyncio.run(Turns(prompt(3), 0, 0, max_response_len=9).ask(engine, {}))
    asyncio.run(Turns(prompt(3), 0, 0).ask(engine, {"top_k": 5}))
    assert [r[2] for r in engine.requests] == [{"max_response_len": 9}, {"top_k": 5}]


def test_a_turn_may_have_a_limit_of_its_own():
    engine = Scripted(([40] * 9, Status.TRUNCATED), ([41, STOP], Status.COMPLETED), context=9)
    turns = Turns(prompt(3), 0, 0)
    found = run(turns, engine, max_response_len=3)
    assert found.token_ids.tolist() == [3, 3, 40, 40, 40, 60, 61, 41, STOP]
    assert found.status is Status.TRUNCATED  # the third turn found no room in the context
    assert turns.room is None
    engine = Scripted(*[([40] * 9, Status.TRUNCATED)] * 9)
    run(Turns(prompt(3), 0, 0, max_response_len=9), engine, max_response_len=3)
    assert [r[2]["max_response_len"] for r in engine.requests] == [3, 3]  # 3 + 2 + 3 + 2: one over


def test_a_prompt_that_is_too_long_from_the_start_is_dropped_as_ever():
    """Case R09."""
    with pytest.raises(PromptTooLong):
        run(Turns(prompt(3), 0, 0), Scripted(context=2))


@pytest.mark.parametrize("status", [Status.ABORTED, Status.FAILED])
def test_an_aborted_turn_ends_the_sample(status):
    """Case R01: whatever came before, it is never trained on."""
    engine = Scripted(([40, STOP], Status.COMPLETED), ([41], status), ([42, STOP], Status.COMPLETED))
    found = run(Turns(prompt(3), 0, 0), engine)
    assert found.status is status
    assert len(engine.requests) == 2
    assert found.token_ids.tolist() == [3, 3, 40, STOP, 60, 61, 41]  # up to where it ended
    turns = Turns(prompt(3), 0, 0)
    turns.add(answer_to(turns.prompt, [40], status=status))
    turns.add(answer_to(turns.prompt, [41]))
    assert turns.sample().status is status


def test_why_a_turn_failed_stays_with_the_sample():
    """Case R18: without it the group would be replaced in vime rollout, not judged."""
    turns = Turns(prompt(3), 0, 0)
    turns.add(answer_to(turns.prompt, [40]))
    turns.add(answer_to(turns.prompt, [0], [float("nan")], status=Status.FAILED, metadata={"failure": "not finite"}))
    found = turns.sample()
    assert (found.status, found.metadata) == (Status.FAILED, {"failure": "not finite", "num_turns": 2})


GENERATE = """
import asyncio
from vime.rollout.turns import Turns

async def generate(engine, prompt, seeds, sampling):
    return await asyncio.gather(*(solve(engine, prompt, i, seed, sampling) for i, seed in enumerate(seeds)))

async def solve(engine, prompt, index, seed, sampling):
    turns = Turns(prompt, seed, index, tokenizer=engine.tokenizer, max_response_len=sampling["max_response_len"])
    for _ in range(1 + index % 2):
        await turns.ask(engine, sampling)
        turns.observe("70 71")
    return turns.sample()

async def bare(engine, prompt, seeds, sampling):
    return (await engine.generate(prompt, seeds))[0]

async def fan_out(engine, prompt, seeds, sampling):
    return [[s, s] for s in await engine.generate(prompt, seeds)]

async def too_few(engine, prompt, seeds, sampling):
    return (await engine.generate(prompt, seeds))[:-1]

async def texts(engine, prompt, seeds, sampling):
    return [s.text for s in await engine.generate(prompt, seeds)]
"""


@pytest.fixture
def user(tmp_path):
    (tmp_path / "several_turns.py").write_text(GENERATE)

    def make(name, num_samples=4):
        settings = {"generate": f"several_turns:{name}", "rollout_batch_size": 2, "num_samples_per_prompt": num_samples}
        config = Config.model_validate({"model": {"path": "m"}, "data": {"prompts": ["a.jsonl"]}, "rollout": settings})
        engine = FakeEngine(lambda p, index, seed: answer_to(p, [int(d) for d in str(seed)[-4:]], text="x"))
        engine.tokenizer = Words()
        return LiveRollouts(config, FakeDataSource(), [engine], FakeReward(), import_paths=[str(tmp_path)])

    return make


def test_a_user_function_with_turns(user):
    batch = user("generate").produce(0)
    assert [row["metadata"]["num_turns"] for row in batch.rows] == [1, 2, 1, 2] * 2
    one, two = batch.sample(0), batch.sample(1)
    assert one.loss_mask.tolist() == [False] * 2 + [True] * 4
    assert two.loss_mask.tolist() == [False] * 2 + [True] * 4 + [False] * 2 + [True] * 4
    assert two.token_ids[6:8].tolist() == [70, 71]
    assert two.token_ids[8:].tolist() == [int(d) for d in str(turn_seed(two.seed, 1))[-4:]]
    assert batch.header.counts == {"status_completed": 8}


@pytest.mark.parametrize(
    ("name", "num_samples", "what", "how"),
    [
        (
            "bare",
            1,
            "returned a Sample; expected a flat list of 1 Sample",
            r"return [sample]: a list, even for one seed",
        ),
        (
            "fan_out",
            4,
            "returned a list of 4 a list of 2 Sample",
            "not a list of lists: rollout.num_samples_per_prompt",
        ),
        ("too_few", 4, "returned a list of 3 Sample; expected a flat list of 4", "one sample for each entry of seeds"),
        ("texts", 2, "returned a list of 2 str", "the list that engine.generate(prompt, seeds, sampling) gives"),
    ],
)
def test_other_shapes_are_refused_and_the_way_out_is_named(user, name, num_samples, what, how):
    """Case R13."""
    with pytest.raises(VimeError, match=what) as refused:
        user(name, num_samples).produce(0)
    assert how in refused.value.hint


def test_samples_with_observations_are_trained_on_their_own_tokens(user):
    """What the trainer gets: weight on sampled tokens alone."""
    from vime.train.steps import train_steps

    batch = user("generate").produce(0)
    config = Config.model_validate({"model": {"path": "m"}, "data": {"prompts": ["a.jsonl"]}})
    config = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"rollout_batch_size": 2, "num_samples_per_prompt": 4})}
    )
    (data,) = train_steps(config, batch, batch.rollout_log_probs_T, batch.rollout_log_probs_T)
    assert ((data.loss_weight_T != 0) == batch.loss_mask_T).all()
