import io
import logging
import threading

import pytest

from vime.errors import UsageError
from vime.log import Progress, describe, get_logger, setup_logging


def test_lines_carry_role_and_rank(monkeypatch):
    monkeypatch.setenv("VIME_LOG_LEVEL", "info")
    stream = io.StringIO()
    setup_logging("trainer", 1, stream)
    get_logger("vime.test").info("hello")
    get_logger("vime.test").debug("not shown")
    assert stream.getvalue().split(" ", 1)[1] == "trainer 1 INFO vime.test: hello\n"


def test_setting_up_twice_prints_once(monkeypatch):
    monkeypatch.delenv("VIME_LOG_LEVEL", raising=False)
    first, second = io.StringIO(), io.StringIO()
    setup_logging(stream=first)
    setup_logging(stream=second)
    get_logger("vime.test").warning("w")
    assert (first.getvalue(), second.getvalue().count("driver WARNING")) == ("", 1)
    assert not logging.getLogger("vime").propagate


def test_an_unknown_level_is_refused(monkeypatch):
    monkeypatch.setenv("VIME_LOG_LEVEL", "LOUD")
    with pytest.raises(UsageError, match="VIME_LOG_LEVEL = LOUD: must be one of DEBUG, INFO, WARNING, ERROR"):
        setup_logging()


ROW = {
    "rollout_id": 3,
    "rollout/raw_reward": 0.5,
    "rollout/truncated_ratio": 0.25,
    "rollout/kl": 0.0,
    "train/grad_norm": float("nan"),
    "perf/generate_tokens_per_second": 812.4,
    "perf/step_time": 4.0,
    "perf/generate_time": 3.0,
    "perf/sync_time": 0.01,
}


def test_one_plain_line_per_rollout_off_a_terminal():
    stream = io.StringIO()
    with Progress(10, stream) as progress:
        with progress.phase("generate", total=8) as phase:
            phase.update(done=4, tokens=100)
        progress.line(ROW)
        progress.warn("careful")
    assert stream.getvalue() == (
        "rollout 3/10  reward 0.500  truncated 25%  kl 0  grad_norm nan  tokens/s 812  4.0s (generate 3.0)\n"
        "warning: careful\n"
    )


def test_off_a_terminal_a_long_phase_says_that_it_goes_on():
    said = threading.Event()

    class Stream(io.StringIO):
        def flush(self):
            said.set()

    stream = Stream()
    with Progress(10, stream, beat_seconds=0.01) as progress, progress.phase("starting"):
        assert said.wait(60)
    assert stream.getvalue().startswith("... starting 0s\n")
    said.clear()
    assert not said.wait(0.1)


def test_on_a_terminal_the_running_phase_is_shown_and_lines_stay():
    stream = io.StringIO()
    with Progress(10, stream, is_terminal=True) as progress, progress.phase("generate", total=8) as phase:
        phase.update(done=4, tokens=100)
        assert "generate 0s 4/8" in progress.__rich__().plain
        progress.note("[bold]kept as it is[/bold]")
    assert "[bold]kept as it is[/bold]" in stream.getvalue()
    assert progress._live is None


def test_an_error_inside_a_phase_ends_the_live_display():
    progress = Progress(stream=io.StringIO(), is_terminal=True)
    with pytest.raises(ZeroDivisionError), progress.phase("train"):
        raise ZeroDivisionError
    assert progress._live is None


def test_absent_metrics_are_left_out():
    assert describe({"rollout_id": 0}) == "rollout 0"
