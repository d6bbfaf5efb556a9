"""Waiting for remote calls: always with a limit, and with the first cause on failure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from vime.cluster.last_words import last_words
from vime.errors import OutOfTime, VimeError

GRACE_SECONDS = 3.0  # after one failure, how long others may still report a better cause
_PEER_LOSS = ("Connection closed by peer", "Connection reset by peer", "connection timed out", "Broken pipe")


def gather(refs: Mapping[str, Any], timeout_seconds: float, what: str) -> dict[str, Any]:
    """Results by name. Raises VimeError with the first cause if any call fails, or names those that did not answer."""
    import ray

    pending = {ref: name for name, ref in refs.items()}
    results: dict[str, Any] = {}
    failures: list[tuple[str, Exception]] = []
    deadline = time.monotonic() + timeout_seconds
    while pending:
        done, _ = ray.wait(list(pending), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            break
        name = pending.pop(done[0])
        try:
            results[name] = ray.get(done[0])
        except (ray.exceptions.RayError, VimeError) as error:
            failures.append((name, error))
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    if failures:
        raise first_cause(failures, what)
    if pending:
        raise OutOfTime(
            f"{what}: no answer from {', '.join(sorted(pending.values()))} within {timeout_seconds:g} s",
            "raise the time limit if the work is merely slow",
        )
    return results


def first_cause(failures: list[tuple[str, Exception]], what: str) -> VimeError:
    """The failure to show: our own errors, then other exceptions, then a death, then the loss of a peer."""
    name, error = min(failures, key=lambda f: _rank(f[1]))
    return explain(name, error, what)


def explain(name: str, error: BaseException, what: str) -> VimeError:
    """A remote failure as a VimeError that names the process."""
    import ray

    cause = getattr(error, "cause", None) or error
    if isinstance(cause, VimeError):
        return cause
    if isinstance(error, ray.exceptions.RayActorError):
        if said := last_words(str(error)):
            return VimeError(
                f"{what}: {name} died: {said}",
                "a crash in native code: a core dump shows its frames (ulimit -c unlimited)",
            )
        return VimeError(
            f"{what}: {name} died ({_one_line(error)})",
            "it left no last words: killed from outside, or out of memory (dmesg tells)",
        )
    detail = f"{type(cause).__name__}: {_one_line(cause)}"
    return VimeError(f"{what}: {name} failed: {detail}", _raised_at(str(error)))


def _rank(error: Exception) -> int:
    import ray

    cause = getattr(error, "cause", None) or error
    if isinstance(cause, VimeError):
        return 0
    if any(sign.lower() in str(error).lower() for sign in _PEER_LOSS):
        return 3
    return 2 if isinstance(error, ray.exceptions.RayActorError) else 1


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:400]


def _raised_at(remote_traceback: str) -> str | None:
    frames = [line.strip() for line in remote_traceback.splitlines() if line.lstrip().startswith("File ")]
    return f"raised at {frames[-1]}" if frames else None
