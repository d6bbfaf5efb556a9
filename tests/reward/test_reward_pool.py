"""RewardPool with real worker processes: limits, crashes, wrong values."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from vime.config.schema import Reward
from vime.errors import UsageError, VimeError
from vime.reward import RewardPool, check
from vime.types import Sample, Status

MODULE = '''
import asyncio, ctypes, os, signal, subprocess, sys, time
import helper_beside_it

CALLS = 0

def by_text(sample):
    """What to do is the text of the sample."""
    global CALLS
    CALLS += 1
    text = sample.text
    if text == "loop":
        while True:
            pass
    if text == "c hang":
        open(os.path.join(os.path.dirname(__file__), "hanging"), "w").close()
        ctypes.PyDLL(None).sleep(1000)  # in C, holding the interpreter's lock
    if text == "mask signals":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        time.sleep(1000)
    if text.startswith("child"):
        process = subprocess.Popen(["sleep", "1000"])
        with open(os.path.join(os.path.dirname(__file__), "child"), "w") as file:
            file.write(str(process.pid))
        os._exit(4) if text == "child, exit" else time.sleep(1000)
    if text == "sys.exit":
        sys.exit(3)
    if text == "os._exit":
        os._exit(4)
    if text == "segfault":
        ctypes.string_at(0)
    if text == "raise":
        raise KeyError("no such thing")
    if text == "print":
        print("talk")
        return 1
    if text == "extras":
        return {"reward": 0.5, "length": 7}
    if text == "calls":
        return CALLS
    if text == "pid":
        return os.getpid()
    return eval(text)

async def later(sample):
    await asyncio.sleep(0)
    return len(sample.text)

def of_group(samples):
    return [len(samples) + s.index for s in samples]

def short_group(samples):
    return [1.0]

def two_arguments(a, b):
    return 1.0

NUMBER = 3
'''


def sample(text="1", index=0, group_id=0, label="1", status=Status.COMPLETED):
    return Sample(
        group_id, index, np.array([1]), 1, np.zeros(1, bool), np.zeros(1), text=text, label=label, status=status
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "my_reward.py").write_text(MODULE)
    (folder / "helper_beside_it.py").write_text("")
    return str(folder)


@pytest.fixture
def pool_of(folder):
    pools = []

    def make(function="by_text", **changes):
        config = Reward(**{"name": "user", "function": f"my_reward:{function}", "timeout_seconds": 60.0, **changes})
        pools.append(RewardPool(config, import_paths=[folder]))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def scores(pool, *texts):
    return pool.score([[sample(text, i) for i, text in enumerate(texts)]])[0]


@pytest.mark.parametrize("text", ["child", "child, exit"])
def test_what_the_function_started_ends_with_its_worker(pool_of, folder, text):
    pool = pool_of(timeout_seconds=2.0)
    if text == "child":
        assert scores(pool, text) == [0.0]
    else:
        with pytest.raises(VimeError, match="exit code 4"):
            scores(pool, text)
    child = Path(f"/proc/{(Path(folder) / 'child').read_text()}/stat")
    deadline = time.monotonic() + 5
    while child.exists() and ") Z" not in child.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or ") Z" in child.read_text()


def test_values_in_order_whatever_finishes_first(pool_of):
    pool = pool_of(num_workers=2)
    assert scores(pool, "__import__('time').sleep(0.2) or 1", "2", "True", "0.5", "print") == [1.0, 2.0, 1.0, 0.5, 1.0]
    assert pool.score([[sample("3")], [], [sample("4", label=None)]]) == [[3.0], [], [4.0]]


def test_async_functions_and_groups(pool_of):
    assert scores(pool_of("later"), "abc", "") == [3.0, 0.0]
    assert scores(pool_of("of_group", per_group=True), "a", "b", "c") == [3.0, 4.0, 5.0]
    with pytest.raises(VimeError, match="returned 1 values, expected a list of 2 rewards"):
        scores(pool_of("short_group", per_group=True), "a", "b")


def test_extra_metrics_land_in_the_sample(pool_of):
    one = sample("extras")
    assert pool_of().score([[one]]) == [[0.5]]
    assert one.metadata == {"reward": {"length": 7}}


@pytest.mark.parametrize("text", ["loop", "c hang", "mask signals"])
def test_endless_calls_are_killed_and_counted(pool_of, text):
    """Case R11: the sample gets the configured score, its neighbours their own."""
    pool = pool_of(timeout_seconds=0.5)
    before = scores(pool, "pid")[0]
    group = [sample(answer, i) for i, answer in enumerate(("1", text, "2"))]
    assert pool.score([group]) == [[1.0, 0.0, 2.0]]
    assert [s.metadata for s in group] == [{}, {"reward_timeout": True}, {}]
    assert pool.counts == {"timeout": 1}
    assert scores(pool, "pid")[0] != before
    assert not os.path.exists(f"/proc/{int(before)}")


def test_timeout_may_drop_the_sample(pool_of):
    assert scores(pool_of(timeout_seconds=0.5, score_on_timeout=None), "loop", "2") == [None, 2.0]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("sys.exit", "raised SystemExit: 3"),
        ("os._exit", r"ended its process \(exit code 4\)"),
        ("segfault", r"ended its process \(signal 11\)"),
        ("raise", "raised KeyError: 'no such thing'"),
        ("float('nan')", "returned nan, expected a finite number"),
        ("float('inf')", "returned inf"),
        ("None", r"returned None \(NoneType\), expected a finite number"),
        ("'1'", r"returned '1' \(str\)"),
        ("{'score': 1}", r"returned a dict without the key 'reward' \(keys: score\)"),
    ],
)
def test_faults_name_sample_and_function(pool_of, text, what):
    """Cases T08, T27 and R01: an error, never a number."""
    pool = pool_of()
    group = [sample("1", index, group_id=7) for index in range(2)] + [sample(text, 2, group_id=7)]
    with pytest.raises(VimeError, match=r"^reward user \(my_reward:by_text\) on sample 7/2: " + what):
        pool.score([group])
    assert scores(pool, "5") == [5.0]  # the pool goes on


def test_aborted_and_failed_samples_are_not_scored(pool_of):
    """Case R01."""
    group = [sample("raise", status=Status.ABORTED), sample("2", 1), sample("raise", 2, status=Status.FAILED)]
    assert pool_of().score([group]) == [[None, 2.0, None]]


def test_a_group_shares_the_event_loop_with_generation(pool_of):
    pool = pool_of()

    async def both():
        ticks = 0
        task = asyncio.create_task(pool.score_group([sample("__import__('time').sleep(0.3) or 1")]))
        while not task.done():
            ticks += 1
            await asyncio.sleep(0.01)
        return ticks, await task

    ticks, result = asyncio.run(both())
    assert result == [1.0]
    assert ticks > 3


def test_close_ends_busy_workers_at_once(pool_of):
    pool = pool_of(num_workers=2)
    pids = [int(p) for p in scores(pool, "pid", "__import__('time').sleep(0.3) or __import__('os').getpid()")]

    async def hang_and_close():
        task = asyncio.create_task(pool.score_group([sample("loop")]))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(pool.close)
        with pytest.raises(VimeError, match="signal 9"):  # and not the score of a timeout
            await task

    asyncio.run(hang_and_close())
    assert [p for p in pids if os.path.exists(f"/proc/{p}")] == []


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("my_reward", "must be package.module:attribute"),
        ("no_such_module:f", "import failed: ModuleNotFoundError"),
        ("my_reward:nothing", "my_reward has no nothing"),
        ("my_reward:NUMBER", "is of type int, not a function"),
        ("my_reward:two_arguments", "is called with 1 positional argument"),
    ],
)
def test_bad_functions_are_found_at_the_start(folder, function, what):
    config = Reward(name="user", function=function)
    with pytest.raises(UsageError, match=what):
        RewardPool(config, import_paths=[folder])
    (problem,) = check(config, import_paths=[folder])
    assert what in problem


def test_settings_are_checked_without_a_worker():
    assert check(Reward(name="exact")) == []
    assert check(Reward(name="math")) == []
    assert "not a regular expression" in check(Reward(name="format", pattern="("))[0]
    assert "needs a pattern" in check(Reward(name="format"))[0]
    assert "needs package.module:attribute" in check(Reward(name="user"))[0]
    assert "only used with reward.name = 'user'" in check(Reward(name="exact", function="a:b"))[0]


def test_missing_label_is_an_error_where_one_is_needed():
    with RewardPool(Reward(name="exact")) as pool:
        assert pool.score([[sample("1"), sample("2", 1)]]) == [[1.0, 0.0]]
        with pytest.raises(VimeError, match="sample 0/0 has no label"):
            pool.score([[sample("1", label=None)]])


ORPHAN = """
import sys, asyncio
sys.path.insert(0, "tests/reward")
from test_reward_pool import Reward, RewardPool, sample
pool = RewardPool(Reward(name="user", function="my_reward:by_text", timeout_seconds=2), import_paths=[sys.argv[1]])
print(int(pool.score([[sample("pid")]])[0][0]), flush=True)
if sys.argv[2] == "hang":
    pool.score([[sample("c hang")]])
sys.stdin.read()
"""


def test_an_interrupt_of_the_terminal_does_not_reach_the_workers(pool_of):
    assert os.getsid(int(scores(pool_of(), "pid")[0])) != os.getsid(0)


@pytest.mark.parametrize("text", ["pid", "hang"])
def test_workers_end_with_their_parent(folder, text):
    marker = Path(folder, "hanging")
    marker.unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, folder, text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    pid = int(process.stdout.readline())
    limit = time.monotonic() + 20
    while text == "hang" and not marker.exists() and time.monotonic() < limit:
        time.sleep(0.01)
    process.kill()
    process.wait(timeout=20)
    process.stdin.close()
    process.stdout.close()
    limit = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not is_running(pid)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_workers_start_light():
    code = "import sys, vime.reward.worker; sys.exit(int(bool({'torch', 'transformers', 'ray'} & set(sys.modules))))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
    code = "import sys, vime.reward; sys.exit(int('numpy' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
