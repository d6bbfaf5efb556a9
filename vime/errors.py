"""Errors a user can act on, and the exit codes of every command."""

from __future__ import annotations

from collections.abc import Sequence

EXIT_OK = 0
EXIT_CHECK_FAILED = 1
EXIT_USAGE = 2
EXIT_RUN_FAILED = 3


def first_line(error: BaseException) -> str:
    """What an error of a library says, cut to one line; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class VimeError(Exception):
    """Something the user can mend: what is wrong, and the next step.

    ``message`` names the field, the value and the rule; ``hint`` the next thing to do. Any other exception that
    reaches the command line is a fault of ours and keeps its traceback.
    """

    exit_code = EXIT_RUN_FAILED

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self):  # survives the trip out of a Ray actor
        return type(self), (self.message, self.hint)


class UsageError(VimeError):
    """Wrong usage or configuration, found before anything was started (exit code 2)."""

    exit_code = EXIT_USAGE


class ConfigError(UsageError):
    """All problems of a configuration at once, one line each."""

    def __init__(self, problems: Sequence[str], hint: str | None = None) -> None:
        super().__init__("\n".join(problems), hint)
        self.problems = tuple(problems)

    def __reduce__(self):
        return type(self), (self.problems, self.hint)


class CheckFailed(VimeError):
    """A verdict was FAIL (exit code 1)."""

    exit_code = EXIT_CHECK_FAILED


class OutOfTime(VimeError):
    """A wait reached its limit. ``culprit``: who is waited for and where, if the waiting side knows it itself."""

    def __init__(self, message: str, hint: str | None = None, culprit: str = "") -> None:
        super().__init__(message, hint)
        self.culprit = culprit

    def __reduce__(self):
        return type(self), (self.message, self.hint, self.culprit)


class PromptTooLong(VimeError):
    """One prompt leaves no room for a response; the others are not concerned."""
