"""``vime debug-attach run -- vime train``: real clients in a trainer rank, the engine core, a reward function and the
driver of a real run, which ends as it would have without; and one that is killed at a stop and leaves nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import Command, vime

import vime as package
from vime.debug.attach.dap import Dap, StackFrame
from vime.metrics import read_jsonl
from vime.record.reader import read

REWARD = """\
def letters(sample):
    value = float(sum(one.isalpha() for one in sample.text))
    return value / 8
"""
REWARD_LINE = 3
STEP = "vime.backends.megatron.step:train_step"
CONNECT = re.compile(r"connect (\S+), or a client of your own to ([\d.]+):(\d+)")
SECONDS = 120.0
SETTINGS = ["run.num_rollouts=1", "parallel.dp=2", "reward.name=user", "reward.function=lettering:letters"]


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """Registry and sockets of this file's runs: a short path, for Ray."""
    folder = Path(tempfile.mkdtemp(prefix="vime-t-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def arguments(workspace: Path) -> list[object]:
    (workspace / "lettering.py").write_text(REWARD)
    return ["train", workspace / "run.toml", *SETTINGS]


def listed(scratch: Path) -> dict:
    command = vime("debug-attach", "list", "--json", "--address", "local", TMPDIR=str(scratch))
    return json.loads(command.text[command.text.index("{") :])


@contextmanager
def debug_run(scratch: Path, options: list[object], arguments: list[object]) -> Iterator[Command]:
    """The started command; whatever goes wrong inside, nothing of it is left."""
    words = ["debug-attach", "run", *options, "--", "vime", *arguments]
    command = Command([str(word) for word in words], {"TMPDIR": str(scratch)})
    try:
        yield command
        assert command.left_behind() == []
    finally:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)
        command.left_behind()


@contextmanager
def attached(command: Command, who: str, hangs_up: bool = True) -> Iterator[tuple[Dap, int, StackFrame]]:
    """A client in the next process that stops, which must be ``who``; it hangs up at the end, and that goes on;
    unless it stays until the process ends.
    """
    line = command.wait_for_line(r"has stopped at")
    assert re.search(rf"{who} \(pid \d+\) has stopped at", line), line
    key, host, port = CONNECT.search(command.wait_for_line(CONNECT.pattern)).groups()
    assert re.match(who.replace(" ", ""), key), key
    with Dap(host, int(port), SECONDS) as client:
        client.attach()
        thread, _ = client.stopped()
        yield client, thread, client.stack(thread)[0]
        if hangs_up:
            client.detach()


def contents(files: list[Path]) -> list[tuple[str, int]]:
    return [(hashlib.blake2b(file.read_bytes()).hexdigest(), file.stat().st_mtime_ns) for file in files]


def source_of(module: str) -> Path:
    return Path(package.__file__).parent / module


@pytest.mark.slow
def test_a_run_that_was_stopped_in_trainer_rank_1_ends_as_one_that_was_not(workspace, tmp_path, scratch, arguments):
    plain = vime(*arguments, f"run.dir={tmp_path / 'plain'}")
    assert plain.process.returncode == 0, plain.text
    where = ["--role", "trainer", "--rank", "1", "-b", STEP]
    debugged_as = [*arguments, f"run.dir={tmp_path / 'debugged'}"]
    with debug_run(scratch, where, debugged_as) as command:
        with attached(command, "trainer 1") as (client, thread, frame):
            assert (frame.name, frame.file) == ("train_step", str(source_of("backends/megatron/step.py")))
            found = {variable.name: variable for variable in client.locals(frame)}
            assert found["learner"].value.startswith("Learner(")
            assert client.evaluate("len(data.offsets)", frame) == "17"
            client.go("next", thread)
            assert client.stopped()[1] == "step"
            (after, *_) = client.stack(thread)
            assert (after.name, after.line) == ("train_step", frame.line + 1)
            assert "started" in {variable.name for variable in client.locals(after)}
            (run,) = listed(scratch)["runs"]
            (behind,) = run["behind"]
            assert behind.startswith("at most 1 trainer rank and the driver wait for trainer 1; smallest time-out: ")
            client.go("continue", thread)
        assert command.finish() == 0, command.text
    assert "raised from train.step_timeout_seconds 1800, rollout.timeout_seconds 1800" in command.text
    (before,), (debugged,) = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("plain", "debugged"))
    exact = {name for name in before if not name.startswith("perf/") and name != "weights/verify_time"}
    assert {"train/loss", "train/grad_norm", "rollout/raw_reward"} <= exact
    assert {name: debugged[name] for name in exact} == {name: before[name] for name in exact}
    written = [(tmp_path / name / "config.toml").read_text() for name in ("plain", "debugged")]
    assert written[0].replace("plain", "debugged") == written[1]
    assert listed(scratch)["stops"] == []


@pytest.mark.slow
def test_stops_everywhere_a_changed_reward_an_exception_and_kill_9(workspace, tmp_path, scratch, arguments):
    import vllm.v1.engine.core as engine_core

    reward = workspace / "lettering.py"
    sources = [reward, source_of("loop.py"), source_of("backends/megatron/step.py"), Path(engine_core.__file__)]
    before = contents(sources)
    points = ["vllm.v1.engine.core:EngineCore.step", f"{reward}:{REWARD_LINE}", "vime.loop:learn", STEP]
    where = ["--post-mortem", *(word for point in points for word in ("-b", point))]
    record = tmp_path / "data_{rollout_id}.pt"
    options = [f"run.dir={tmp_path / 'run'}", "--save-debug-rollout-data", record]
    with debug_run(scratch, where, [*arguments, *options]) as command:
        with attached(command, "engine core 0") as (client, _, frame):
            assert frame.name == "step"
            assert client.evaluate("len(self.scheduler.requests) > 0", frame) == "True"
        with attached(command, "reward worker 0") as (client, _, frame):
            assert (frame.file, frame.line) == (str(reward), REWARD_LINE)
            client.evaluate("value = 800.0", frame)
        with attached(command, "driver") as (client, _, frame):
            assert frame.name == "learn"
            assert client.evaluate("float(batch.rewards_N.max())", frame) == "100.0"
        with attached(command, r"trainer \d") as (client, _, frame):
            client.evaluate("learner = None", frame)
        with attached(command, r"trainer \d", hangs_up=False) as (client, _, frame):
            assert frame.name == "train_step"
            assert {variable.name: variable.value for variable in client.locals(frame)}["learner"] == "None"
            found = listed(scratch)
            (stop,) = [one for one in found["stops"] if one["point"] == "post-mortem"]
            assert (stop["state"], stop["reason"].partition(":")[0]) == ("attached", "AttributeError"), found
            os.kill(found["runs"][0]["run"]["child_pid"], signal.SIGKILL)
        assert command.finish() == 128 + signal.SIGKILL, command.text
    assert contents(sources) == before
    after = listed(scratch)
    assert (after["stops"], after["runs"]) == ([], [])
    rewards = [sample.reward for sample in read(str(record).format(rollout_id=0)).samples()]
    assert sorted(rewards)[-1] == 100.0
    assert sorted(rewards)[-2] <= 1.0, "one call of the function was changed"


def test_an_error_that_ends_a_command_is_stopped_at_and_the_exit_code_is_kept(workspace, tmp_path, scratch):
    nobody = 'rollout.engines=["http://127.0.0.1:1"]'
    asked = ["rollout", workspace / "run.toml", f"run.dir={tmp_path / 'run'}", "-n1", nobody]
    with debug_run(scratch, ["--post-mortem"], asked) as command:
        with attached(command, "driver") as (client, _, frame):
            assert (frame.name, frame.file) == ("_request", str(source_of("backends/vllm/server.py")))
            assert client.evaluate("self.url", frame) == "'http://127.0.0.1:1'"
        assert command.finish() == 3, command.text
    assert "error: http://127.0.0.1:1: no server answers there" in command.text
