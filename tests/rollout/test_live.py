"""LiveRollouts over fake engines: order, refills, limits, failures."""

import gc

import numpy as np
import pytest
from fakes import FakeDataSource, FakeEngine, FakeReward, aborted, answer, sample

from vime.config.schema import Config
from vime.errors import PromptTooLong, UsageError, VimeError
from vime.rollout.live import LiveRollouts
from vime.rollout.seeds import seed_for
from vime.types import RolloutHeader, Status


def config_of(**rollout):
    rollout = {"rollout_batch_size": 4, "num_samples_per_prompt": 4, "timeout_seconds": 60.0, **rollout}
    return Config.model_validate(
        {"run": {"seed": 7}, "model": {"path": "m"}, "data": {"prompts": ["a.jsonl"]}, "rollout": rollout}
    )


def rollouts_of(*engines, source=None, reward=None, config=None, **kwargs):
    return LiveRollouts(
        config or config_of(), source or FakeDataSource(), engines or [FakeEngine()], reward or FakeReward(), **kwargs
    )


def names(batch):
    return [f"{g}/{i}" for g, i in zip(batch.group_ids_N, batch.indices_N, strict=True)]


def test_groups_come_in_prompt_order_whatever_finishes_first():
    delays = {0: 0.06, 1: 0.02, 2: 0.04, 3: 0.0}
    batch = rollouts_of(FakeEngine(delays=delays)).produce(0)
    assert names(batch) == [f"{g}/{i}" for g in range(4) for i in range(4)]
    assert batch.rewards_N.tolist() == [0.0, 1.0, 2.0, 3.0] * 4
    assert batch.rows[0]["label"] == "0"
    assert batch.rows[0]["prompt_text"] == "prompt 0"


def test_seeds_come_from_the_place_and_not_from_the_split_over_engines():
    """Case R16: distinct inside a group, equal when re-run, whatever the number of engines."""
    one = rollouts_of().produce(3)
    two = rollouts_of(FakeEngine(delays={0: 0.03}), FakeEngine(delays={1: 0.02})).produce(3)
    seeds = [row["seed"] for row in one.rows]
    assert seeds == [seed_for(7, 3, g, i) for g in range(4) for i in range(4)]
    assert len(set(seeds)) == 16
    assert one.token_ids_T.tobytes() == two.token_ids_T.tobytes()
    assert one.rows == two.rows
    assert [r["seed"] for r in rollouts_of().produce(4).rows] != seeds


def test_each_group_goes_to_the_engine_with_the_fewest_outstanding_tokens():
    engines = [FakeEngine(delays={0: 0.2}), FakeEngine()]
    rollouts_of(*engines, source=FakeDataSource(lengths={0: 2000, 1: 5, 2: 5, 3: 5})).produce(0)
    assert [[group for group, _, _ in e.requests] for e in engines] == [[0], [1, 2, 3]]


def test_engines_that_are_done_are_asked_again():
    engines = [FakeEngine(), FakeEngine()]
    rollouts = rollouts_of(*engines, source=FakeDataSource(lengths={0: 2000}))
    rollouts.produce(0)
    rollouts.produce(1)
    assert [sum(group >= 4 for group, _, _ in e.requests) for e in engines] == [2, 2]


def test_a_group_is_scored_while_others_generate():
    order = []

    class Slow(FakeEngine):
        async def generate(self, prompt, seeds, sampling=None):
            samples = await super().generate(prompt, seeds, sampling)
            order.append(f"answered {prompt.group_id}")
            return samples

    def reward(sample):
        order.append(f"scored {sample.group_id}")
        return 1.0

    config = config_of(rollout_batch_size=2, num_samples_per_prompt=1)
    rollouts_of(Slow(delays={1: 0.1}), reward=FakeReward(reward), config=config).produce(0)
    assert order == ["answered 0", "scored 0", "answered 1", "scored 1"]


def test_a_group_with_an_aborted_sample_is_replaced_and_counted():
    """Case R01: it is never scored and never trained on."""

    def script(prompt, index, seed):
        return aborted(prompt, index, seed) if prompt.group_id == 1 else answer(prompt, index, seed)

    reward = FakeReward()
    batch = rollouts_of(FakeEngine(script), reward=reward).produce(0)
    assert sorted(set(batch.group_ids_N.tolist())) == [0, 2, 3, 4]
    assert batch.header.counts == {"dropped_aborted": 1, "status_completed": 16}
    assert 1 not in reward.scored


def test_a_sample_without_verdict_takes_its_group_along():
    reward = FakeReward(lambda s: None if (s.group_id, s.index) == (2, 3) else 1.0)
    batch = rollouts_of(reward=reward).produce(0)
    assert sorted(set(batch.group_ids_N.tolist())) == [0, 1, 3, 4]
    assert batch.header.counts["dropped_reward_timeout"] == 1


def too_long(*group_ids):
    def script(prompt, index, seed):
        if prompt.group_id in group_ids:
            raise PromptTooLong(f"group {prompt.group_id}: 240 prompt tokens, the context has 128")
        return answer(prompt, index, seed)

    return script


def test_a_prompt_over_the_context_is_dropped_alone(caplog):
    """Case R09."""
    batch = rollouts_of(FakeEngine(too_long(1, 2)), source=FakeDataSource(lengths={1: 240, 2: 240})).produce(0)
    assert sorted(set(batch.group_ids_N.tolist())) == [0, 3, 4, 5]
    assert batch.header.counts["dropped_prompt_too_long"] == 2
    assert "group 1 dropped, 240 prompt tokens" in caplog.text
    assert "the context has 128" in caplog.text


def test_groups_without_spread_are_replaced():
    reward = FakeReward(lambda s: float(s.index) if s.group_id % 2 else 1.0)
    batch = rollouts_of(reward=reward, config=config_of(group_filter="nonzero_spread")).produce(0)
    assert sorted(set(batch.group_ids_N.tolist())) == [1, 3, 5, 7]
    assert batch.header.counts["dropped_zero_spread"] == 4  # groups 0 and 2, then 4 of 4 and 5, then 6


def test_endless_refilling_stops_with_the_shares():
    """Case R15."""
    config = config_of(group_filter="nonzero_spread", max_filter_rounds=2)
    with pytest.raises(VimeError) as caught:
        rollouts_of(reward=FakeReward(lambda s: 1.0), config=config).produce(5)
    assert caught.value.message == (
        "rollout 5: 0 of 4 groups after 2 refills; kept per round: 0/4, 0/4, 0/4; left out: zero_spread 12"
    )
    assert "prompts of mixed difficulty" in caught.value.hint


def test_an_engine_that_fails_ends_the_rollout_with_the_first_cause():
    """Case T25."""

    def script(prompt, index, seed):
        if prompt.group_id == 1:
            raise ConnectionError("engine process died")
        return answer(prompt, index, seed)

    engines = [FakeEngine(script, delays={0: 60.0, 2: 60.0}), FakeEngine(script, delays={1: 0.01, 3: 60.0})]
    with pytest.raises(VimeError) as caught:
        rollouts_of(*engines).produce(0)
    assert caught.value.message == (
        "engine 1 failed on group 1: ConnectionError: engine process died; "
        "pending: engine 0: groups 0, 2; engine 1: groups 1, 3"
    )
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert sorted(engines[0].cancelled + engines[1].cancelled) == [0, 2, 3]


def test_failures_after_the_first_leave_no_noise(caplog):
    def script(prompt, index, seed):
        raise ConnectionError(f"engine died under group {prompt.group_id}")

    with pytest.raises(VimeError, match="engine 0 failed on group 0: ConnectionError: engine died under group 0"):
        rollouts_of(FakeEngine(script)).produce(0)
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_time_limit_names_who_is_awaited():
    config = config_of(timeout_seconds=0.1)
    with pytest.raises(VimeError, match=r"timeout_seconds=0\.1; pending: engine 0: groups 1, 3"):
        rollouts_of(FakeEngine(delays={1: 60.0, 3: 60.0}), config=config).produce(0)


def test_the_time_limit_is_for_all_rounds_together():
    config = config_of(timeout_seconds=0.5, group_filter="nonzero_spread", max_filter_rounds=100)
    engine = FakeEngine(delays=dict.fromkeys(range(1000), 0.1))
    with pytest.raises(VimeError, match=r"no complete rollout within rollout\.timeout_seconds=0\.5"):
        rollouts_of(engine, reward=FakeReward(lambda s: 1.0), config=config).produce(0)
    assert len(engine.requests) <= 4 * 6


def test_what_goes_wrong_when_time_is_up_is_not_the_cause():
    class Untidy(FakeEngine):
        async def generate(self, prompt, seeds, sampling=None):
            try:
                return await super().generate(prompt, seeds, sampling)
            finally:
                if prompt.group_id == 1:
                    raise ConnectionError("closed while it was read from")

    config = config_of(timeout_seconds=0.1)
    engine = Untidy(delays={1: 60.0})
    engine_of_others = FakeEngine()
    with pytest.raises(VimeError, match=r"timeout_seconds=0\.1; pending: engine \d: groups 1$"):
        rollouts_of(engine_of_others, engine, config=config).produce(0)


def test_a_reward_that_fails_names_group_and_cause():
    """Case T08."""

    def reward(sample):
        if (sample.group_id, sample.index) == (2, 1):
            raise VimeError(f"reward user (m:f) on {sample.name}: returned nan, expected a finite number", "mend it")
        return 1.0

    with pytest.raises(
        VimeError, match=r"reward failed on group 2: reward user \(m:f\) on sample 2/1: returned nan"
    ) as e:
        rollouts_of(reward=FakeReward(reward)).produce(0)
    assert e.value.hint == "mend it"


def test_engine_prompt_tokens_must_be_those_that_were_sent():
    def script(prompt, index, seed):
        return sample(prompt.group_id, index, prompt_len=1)

    with pytest.raises(VimeError, match="sample 0/0: its 1 prompt tokens are not the 2 that were sent"):
        rollouts_of(FakeEngine(script)).produce(0)


def test_header_and_progress():
    seen = []
    header = RolloutHeader(sampling={"temperature": 1.0})
    rollouts = rollouts_of(header=header, on_progress=lambda *numbers: seen.append(numbers))
    batch = rollouts.produce(0)
    assert [n[:2] for n in seen] == [(4, 16), (8, 16), (12, 16), (16, 16)]
    assert seen[-1][2] == int(batch.response_lens_N.sum())
    assert batch.header.sampling == {"temperature": 1.0}
    assert batch.header.seed == 7
    assert batch.header.counts == {"status_completed": 16}


def test_the_header_has_the_newest_weights_that_answered():
    """Case R21."""

    def script(prompt, index, seed):
        newest = 7 if (prompt.group_id, index) == (1, 2) else 6
        return sample(prompt.group_id, index, weight_version_min=5, weight_version_max=newest)

    assert rollouts_of(FakeEngine(script)).produce(0).header.weight_version == 7


def test_resume_goes_on_with_the_next_prompts():
    first = rollouts_of()
    first.produce(0)
    second = rollouts_of()
    second.load_state_dict(first.state_dict())
    assert names(second.produce(1)) == names(first.produce(1))
    with pytest.raises(VimeError, match="was written by a replay"):
        rollouts_of().load_state_dict({})


USER = """
import asyncio

import numpy as np
from vime.types import Sample, Status

async def single_turn(engine, prompt, seeds, sampling):
    assert sampling["temperature"] == 1.0
    return await engine.generate(prompt, seeds)

async def one_aborted(engine, prompt, seeds, sampling):
    samples = await engine.generate(prompt, seeds)
    if prompt.group_id == 0:
        samples[2].status = Status.ABORTED
    return samples

async def fan_out(engine, prompt, seeds, sampling):
    return [[s, s] for s in await engine.generate(prompt, seeds)]

async def too_few(engine, prompt, seeds, sampling):
    return (await engine.generate(prompt, seeds))[:1]

async def strings(engine, prompt, seeds, sampling):
    return ["answer"] * len(seeds)

async def nothing(engine, prompt, seeds, sampling):
    return None

def not_async(engine, prompt, seeds, sampling):
    return []

async def shuffled(engine, prompt, seeds, sampling):
    return (await engine.generate(prompt, seeds))[::-1]

async def reencoded(engine, prompt, seeds, sampling):
    samples = await engine.generate(prompt, seeds)
    for s in samples:
        s.rollout_log_probs = np.zeros(len(s.token_ids))
    return samples

async def text_only(engine, prompt, seeds, sampling):
    p = len(prompt.token_ids)
    return [
        Sample(prompt.group_id, i, prompt.token_ids, p, np.zeros(p, bool), np.zeros(p), text="hi")
        for i in range(len(seeds))
    ]

async def unmasked(engine, prompt, seeds, sampling):
    samples = await engine.generate(prompt, seeds)
    for s in samples:
        s.loss_mask[:] = False
    return samples

async def encoded_again(engine, prompt, seeds, sampling):
    samples = await engine.generate(prompt, seeds)
    for s in samples:
        s.token_ids = np.append(s.token_ids, 7).astype(np.int32)
    return samples

async def cancels(engine, prompt, seeds, sampling):
    if prompt.group_id == 2:
        task = asyncio.ensure_future(engine.generate(prompt, seeds))
        task.cancel()
        await task
    return await engine.generate(prompt, seeds)

async def raises(engine, prompt, seeds, sampling):
    raise KeyError("tool")

async def leaves(engine, prompt, seeds, sampling):
    raise SystemExit(0)

async def three_arguments(engine, prompt, seeds):
    return []
"""


@pytest.fixture
def user(tmp_path):
    (tmp_path / "my_generate.py").write_text(USER)

    def make(name, **kwargs):
        return rollouts_of(config=config_of(generate=f"my_generate:{name}"), import_paths=[str(tmp_path)], **kwargs)

    return make


def test_user_generation(user):
    assert user("single_turn").produce(0).rows == rollouts_of().produce(0).rows
    assert user("one_aborted").produce(0).header.counts["dropped_aborted"] == 1


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("fan_out", r"returned a list of 4 a list of 2 Sample; expected a flat list of 4 Sample"),
        ("too_few", r"returned a list of 1 Sample; expected a flat list of 4 Sample, one per seed, for group 0"),
        ("strings", r"returned a list of 4 str"),
        ("nothing", r"returned a NoneType"),
        ("not_async", r"returned an empty list at once"),
        ("shuffled", r"returned sample 0/3 at place 0"),
        ("reencoded", r"sample 0/0: has 4 sampled tokens without log-probs"),
        ("text_only", r"sample 0/0: has text but no response tokens"),
        ("encoded_again", r"ValueError: sample 0/0: unequal lengths {'token_ids': 7, 'loss_mask': 6"),
        ("unmasked", r"sample 0/0: has 4 response tokens and none that the policy sampled"),
        ("raises", r"KeyError: 'tool' \(.*my_generate\.py:\d+\); pending"),
        ("leaves", r"raised SystemExit: 0 \(.*my_generate\.py:\d+\)"),
    ],
)
def test_what_a_user_function_must_return(user, name, what):
    """Cases R06 and R13: refused at the first sample, with the expected shape."""
    with pytest.raises(
        VimeError, match=rf"^rollout\.generate \(my_generate:{name}, engine 0\) failed on group 0: {what}"
    ):
        user(name).produce(0)


def test_a_user_function_that_cancels_itself(user):
    with pytest.raises(VimeError, match=r"^rollout\.generate \(my_generate:cancels, engine 0\): groups 2: cancelled"):
        user("cancels").produce(0)


def test_user_functions_are_checked_before_anything_starts(user):
    with pytest.raises(UsageError, match=r"rollout\.generate.*is called with 4 positional argument"):
        user("three_arguments")


def test_true_zero_log_probs_and_empty_answers_are_kept():
    """Case R03."""

    def script(prompt, index, seed):
        if index == 0:
            return sample(prompt.group_id, index, response=(), text="")
        return sample(prompt.group_id, index, response=(5, 6, 7, 8), log_probs=[0.0] * 4, status=Status.TRUNCATED)

    batch = rollouts_of(FakeEngine(script)).produce(0)
    assert batch.response_lens_N.tolist() == [0, 4, 4, 4] * 4
    assert not np.any(batch.rollout_log_probs_T)


@pytest.mark.parametrize(
    ("log_probs", "what"),
    [([-0.5], "unequal lengths"), ([-0.5, float("nan")], r"rollout_log_probs\[3\] is nan")],
)
def test_missing_and_not_finite_log_probs_are_refused(log_probs, what):
    """Case R03: never replaced by 0.0."""

    def script(prompt, index, seed):
        return sample(prompt.group_id, index, response=(5, 6), log_probs=log_probs)

    with pytest.raises(VimeError, match=rf"engine 0 failed on group 0: ValueError: sample 0/0: {what}"):
        rollouts_of(FakeEngine(script)).produce(0)
