"""The watchdog: limits name their culprit, unusual phases are said once, a blocked driver is ended."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from fakes import FakeDataSource, FakeEngine

from vime.config.schema import Config
from vime.debug.processes import Member, Roster
from vime.debug.watchdog import Limit, Watchdog
from vime.errors import OutOfTime
from vime.log import Progress
from vime.reward.pool import RewardPool
from vime.rollout import awaited
from vime.rollout.live import LiveRollouts
from vime.runs.ending import ends_in_order
from vime.runs.watched import limits_of

REWARD = """
import time

def hangs(sample):
    if sample.index == 1:
        time.sleep(120)
    return 1.0
"""


def config_of(**sections):
    rollout = {
        "rollout_batch_size": 4,
        "num_samples_per_prompt": 2,
        "timeout_seconds": 1.0,
        **sections.pop("rollout", {}),
    }
    return Config.model_validate(
        {"model": {"path": "m"}, "data": {"prompts": ["a.jsonl"]}, "rollout": rollout, **sections}
    )


def watchdog_of(folder, **changes):
    said = io.StringIO()
    roster = Roster(members=[Member.here("driver")])
    return Watchdog(folder, Progress(1, said, False), roster, **{"look_seconds": 0.02, **changes}), said


def limited(folder, rollouts, **changes):
    """The error of a rollout that hangs, as the run ends with it, and what was said."""
    watchdog, said = watchdog_of(folder, **changes)
    watchdog.pending = rollouts.pending
    with ends_in_order(), watchdog.awake(), pytest.raises(OutOfTime) as error:  # noqa: SIM117 too long for one line
        with watchdog.explaining(), watchdog.phase("generate"):
            rollouts.produce(0)
    return error.value, said.getvalue()


def test_a_reward_that_hangs_is_named_first(tmp_path):
    (tmp_path / "my_reward.py").write_text(REWARD)
    config = config_of(reward={"name": "user", "function": "my_reward:hangs", "timeout_seconds": 60.0})
    with RewardPool(config.reward, [str(tmp_path)]) as reward:
        live = LiveRollouts(config, FakeDataSource(), [FakeEngine()], reward)
        error, said = limited(tmp_path, live)
        (pid,) = [worker.process.pid for worker in reward._alive]
    culprit, waited, stacks = error.message.splitlines()
    assert culprit == f"reward worker (pid {pid}) is in my_reward.py:6 hangs"
    assert waited == "no complete rollout within rollout.timeout_seconds=1; pending: reward: groups 0, 1, 2, 3"
    path = stacks.partition(": ")[2]
    assert stacks.startswith("stacks of 2 processes: ")
    assert "where every process is:\n  reward worker: my_reward.py:6 hangs\n" in said
    written = Path(path).read_text(encoding="utf-8")
    assert written.startswith(culprit)
    assert "==== driver (pid " in written
    assert "==== reward worker (pid " in written


async def forgotten():
    await asyncio.sleep(120)


async def waits_for_ever(engine, prompt, seeds, sampling):
    if prompt.group_id == 2:
        await forgotten()
    return await engine.generate(prompt, seeds, sampling)


async def waits_in_tasks(engine, prompt, seeds, sampling):
    await asyncio.gather(*(forgotten() for _ in seeds))


async def blocks(engine, prompt, seeds, sampling):
    time.sleep(120)


class NoReward:
    async def score_group(self, samples):
        return [1.0 for _ in samples]


def live(name, **engine):
    config = config_of(rollout={"generate": f"{__name__}:{name}"})
    return LiveRollouts(config, FakeDataSource(), [FakeEngine(**engine)], NoReward())


@pytest.mark.parametrize(("name", "times"), [("waits_for_ever", ""), ("waits_in_tasks", " (8 times)")])
def test_a_user_function_that_waits_is_named_with_its_line(tmp_path, name, times):
    """A coroutine that waits is on no stack."""
    error, _ = limited(tmp_path, live(name))
    line = forgotten.__code__.co_firstlineno + 1
    assert error.message.splitlines()[0] == (
        f"rollout.generate = {__name__}:{name} waits at {os.path.basename(__file__)}:{line} forgotten{times}"
    )


async def only_asks(engine, prompt, seeds, sampling):
    return await asyncio.create_task(engine.generate(prompt, seeds, sampling))


def test_a_user_function_that_waits_for_the_engine_is_not_to_blame(tmp_path, monkeypatch):
    monkeypatch.setattr(awaited, "is_users", lambda file: file == __file__)  # the fake engine stands for vime's
    error, _ = limited(tmp_path, live("only_asks", delays={1: 60.0}))
    assert error.message.startswith("no complete rollout within")
    assert error.culprit == ""
    error, _ = limited(tmp_path, live("waits_for_ever", delays={0: 60.0, 1: 60.0, 3: 60.0}))
    assert error.message.splitlines()[0].endswith(" forgotten")


def test_a_driver_that_is_blocked_by_the_user_is_interrupted_and_named(tmp_path):
    """The limit of the rollout never comes: its clock is the event loop, which stands still."""
    limits = {"generate": Limit("rollout.timeout_seconds", 1.0, overdue=1.5)}
    error, said = limited(tmp_path, live("blocks"), limits=limits)
    line = blocks.__code__.co_firstlineno + 1
    culprit, waited, _ = error.message.splitlines()
    assert culprit == f"driver (pid {os.getpid()}) is in test_stacks_watchdog.py:{line} blocks"
    assert waited.startswith("generate: the driver itself is blocked, ")
    assert waited.endswith(f"; pending: rollout.generate ({__name__}:blocks, engine 0): groups 0")
    assert f"driver: test_stacks_watchdog.py:{line} blocks" in said
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_driver_that_no_signal_reaches_is_ended_with_exit_code_3(tmp_path):
    code = f"""
        import signal, sys, time
        from pathlib import Path
        from vime.debug import watchdog
        from vime.debug.processes import Member, Roster
        from vime.log import Progress
        watchdog.LAST_RESORT_SECONDS = 0.3
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        limits = {{"generate": watchdog.Limit("rollout.timeout_seconds", 0.1, overdue=0.2)}}
        roster = Roster(members=[Member.here("driver")])
        made = watchdog.Watchdog(Path({str(tmp_path)!r}), Progress(), roster, limits, look_seconds=0.05)
        with made.awake(), made.explaining(), made.phase("generate"):
            time.sleep(60)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=50)
    assert done.returncode == 3
    assert "error: generate: the driver itself is blocked" in done.stderr


def test_a_phase_that_takes_far_longer_than_usual_is_said_once_and_goes_on(tmp_path):
    watchdog, said = watchdog_of(
        tmp_path,
        unusual_seconds=0.1,
        limits={"train": Limit("train.step_timeout_seconds", 1800.0)},
        pending=lambda: "engine 0: groups 3",
    )
    with watchdog.awake():
        for _ in range(3):
            with watchdog.phase("train"):
                pass
        with watchdog.phase("train"):
            wait_for(lambda: "stacks in full" in said.getvalue())
            time.sleep(0.2)  # once is enough
    text = said.getvalue()
    assert text.count("warning: train goes on for ") == 1
    assert "; pending: engine 0: groups 3; smallest time-out left: train.step_timeout_seconds, " in text
    assert len(list(tmp_path.glob("stacks_train_unusual_*.txt"))) == 1


def test_nothing_is_said_of_a_usual_run(tmp_path):
    """Fewer than three phases tell nothing about what is usual; slow is not slow where it always is."""
    watchdog, said = watchdog_of(tmp_path, unusual_seconds=0.05, limits=limits_of(config_of()))
    with watchdog.awake():
        for _ in range(2):
            with watchdog.phase("train"):
                time.sleep(0.1)
        with watchdog.phase("train"), watchdog.explaining():
            time.sleep(0.3)
    assert (said.getvalue(), list(tmp_path.iterdir())) == ("", [])
    assert "vime-watchdog" not in [thread.name for thread in threading.enumerate()]


def test_the_end_of_a_run_that_failed_is_not_disturbed(tmp_path):
    """Its phase is over, however long the processes take to end."""
    limits = {"generate": Limit("rollout.timeout_seconds", 0.05, overdue=0.1)}
    watchdog, said = watchdog_of(tmp_path, limits=limits)
    with watchdog.awake():
        with pytest.raises(ValueError, match="first"), watchdog.explaining(), watchdog.phase("generate"):
            raise ValueError("first")
        time.sleep(0.3)  # a SIGTERM would end the tests
    assert said.getvalue() == ""


def test_a_plain_interrupt_stays_one(tmp_path):
    watchdog, _ = watchdog_of(tmp_path)
    with watchdog.awake(), pytest.raises(KeyboardInterrupt), watchdog.explaining():
        raise KeyboardInterrupt


def test_only_phases_that_the_users_code_can_block_have_an_end_of_their_own():
    limits = limits_of(config_of(eval={"prompts": ["e.jsonl"]}))
    assert {name for name, limit in limits.items() if limit.overdue is not None} == {"generate", "eval"}
    assert limits["generate"].overdue == 1.0 + 15.0
    assert set(limits) == {"log_probs", "train", "save", "load", "export", "sync", "generate", "eval"}
    recorded = limits_of(config_of(debug={"load_rollout_data": "d.pt"}))
    assert "generate" not in recorded  # a record is read however long it takes
    shared = limits_of(config_of(cluster={"colocate": True}))
    assert shared["generate"].overdue == 16.0 + 300.0 + 1800.0


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def test_a_disk_that_is_full_hides_nothing(tmp_path):
    watchdog, said = watchdog_of(tmp_path / "gone")
    with pytest.raises(OutOfTime, match="no answer from rank 1"), watchdog.explaining():
        raise OutOfTime("step: no answer from rank 1")
    assert "cannot be written: No such file or directory" in said.getvalue()
