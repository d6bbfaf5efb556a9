"""What a command turns an outcome into: text on the right stream, and an exit code."""

import json
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from vime.errors import CheckFailed, UsageError, VimeError
from vime.types import CheckResult, Verdict
from vime_cli import output, train
from vime_cli.app import app
from vime_cli.options import split


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (
            UsageError("a is wrong\nb is wrong", "mend them"),
            2,
            "error: a is wrong\nerror: b is wrong\nhint: mend them\n",
        ),
        (CheckFailed("kl is not 0"), 1, "error: kl is not 0\n"),
        (VimeError("engine 0 died"), 3, "error: engine 0 died\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_an_error_becomes_a_message_and_an_exit_code(monkeypatch, error, code, text):
    def fail(call):
        raise error

    monkeypatch.setattr(train, "prepare", fail)
    result = CliRunner().invoke(app, ["train", "run.toml"])
    assert (result.exit_code, result.stderr, result.stdout) == (code, text, "")


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch):
    def fail(call):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(train, "prepare", fail)
    result = CliRunner().invoke(app, ["train", "run.toml"])
    assert result.exit_code == 3
    assert "Traceback" in result.stderr
    assert "error: ZeroDivisionError: division by zero" in result.stderr


class Result:
    """The part of a run's result that is printed."""

    failed_checks: ClassVar[list] = []
    summary = None
    comparisons: ClassVar[list] = []

    def rows(self):
        return [("mean reward", "0.100 -> 0.900")]

    def example_rows(self):
        return [("3+4=", "7", "5", "7")]

    def as_dict(self):
        return {"rewards": [0.1, float("nan"), float("inf")], "run_dir": "runs/run"}


def test_a_failed_check_is_exit_code_1_after_the_result_is_printed(capsys):
    result = Result()
    result.failed_checks = [CheckResult("log_probs == ref_log_probs", Verdict.FAIL, "3 of 9 tokens differ")]
    with pytest.raises(CheckFailed, match="3 of 9 tokens differ") as error:
        output.result(result, as_json=True)
    assert json.loads(capsys.readouterr().out)["run_dir"] == "runs/run"
    assert error.value.exit_code == 1


def test_result_as_table_and_as_json(capsys):
    output.result(Result(), as_json=False)
    out = capsys.readouterr().out
    assert "mean reward   0.100 -> 0.900" in out
    assert "3+4=     7       5        7" in out
    output.result(Result(), as_json=True)
    assert json.loads(capsys.readouterr().out) == {"rewards": [0.1, "nan", "inf"], "run_dir": "runs/run"}


def test_off_a_terminal_no_line_is_wrapped(capsys):
    output.table("", ("a",), [("x" * 500,)])
    assert "x" * 500 in capsys.readouterr().out


def test_arguments_are_files_or_settings():
    files, overrides = split(["a.toml", "train.lr=1", "data.prompts=['x.toml']", "dir=1/b.toml", "nonsense"])
    assert [str(f) for f in files] == ["a.toml"]
    assert overrides == ["train.lr=1", "data.prompts=['x.toml']", "dir=1/b.toml", "nonsense"]


@pytest.mark.parametrize(("num_bytes", "text"), [(0, "-"), (512, "512 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB")])
def test_size(num_bytes, text):
    assert output.size(num_bytes) == text
