"""The command of a debug run as a job of a Ray cluster, through Ray's own client: it knows the token, if any."""

from __future__ import annotations

import asyncio
import logging
import queue
import shlex
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vime.debug.attach import gcs
from vime.debug.launch.plan import Plan
from vime.debug.stop.registry import GcsRegistry, Registry
from vime.errors import EXIT_CHECK_FAILED, UsageError, VimeError, first_line

STOP_SECONDS = 60.0
"""Longest wait for a job to end; Ray itself kills it 3 s after it was asked to."""
LOOK_SECONDS = 0.2
STATUS_SECONDS = 1.0
LOG_SECONDS = 5.0
"""How long the last lines of the log may take once the job has ended."""
MARK = "vime-debug-run"
_CHATTY = ("dashboard.modules.job.sdk", "dashboard.modules.dashboard_sdk", "_private.runtime_env.packaging")
"""Ray's modules that report on uploads and connections."""


@dataclass
class SubmittedJob:
    """A submitted job. ``registry``: None until the job has said where its cluster's store is."""

    plan: Plan
    client: Any
    job: str
    show: Callable[[str], None]
    say: Callable[[str], None]
    registry: Registry | None = None
    pid: int = 0
    _lines: queue.Queue[str] = field(default_factory=queue.Queue)
    _rest: str = ""
    _looked: float = 0.0
    _details: Any = None
    _is_lost: bool = False
    _tail: threading.Thread | None = None

    @classmethod
    def start(cls, plan: Plan, show: Callable[[str], None], say: Callable[[str], None]) -> SubmittedJob:
        """``show``: the job's own output; ``say``: ours. UsageError where it cannot be submitted."""
        client = client_of(plan.address)
        try:
            job = client.submit_job(entrypoint=entrypoint(plan), runtime_env=plan.runtime_env)
        except _failures() as error:
            raise UsageError(f"{plan.address}: the job was refused: {first_line(error)}") from error
        found = cls(plan, client, job, show, say)
        found._tail = threading.Thread(target=found._follow, name="job-log", daemon=True)
        found._tail.start()
        return found

    def ended(self) -> int | None:
        """Exit code; None while it runs. Passes the log on meanwhile."""
        self._pass_on()
        if self._details is None and time.monotonic() - self._looked > STATUS_SECONDS:
            self._looked = time.monotonic()
            self._look()
        if self._details is None:
            return None
        self._end_log()
        code = self._details.driver_exit_code
        if self._details.status == "SUCCEEDED":
            return 0
        return code if code else EXIT_CHECK_FAILED

    def failure(self) -> str:
        """What ended it, where that is not its own exit code."""
        if self._details is None or self._details.status == "SUCCEEDED":
            return ""
        code = self._details.driver_exit_code
        message = (self._details.message or "").strip().splitlines()
        why = f", exit code {code}" if code is not None else f": {message[0]}" if message else ""
        return f"job {self.job} {self._details.status}{why}"

    def stop(self, is_urgent: Callable[[], bool]) -> None:
        """End it, and wait until it has."""
        stop_job(self.client, self.job, self.plan.address, self._pass_on)
        self._look()

    def close(self, is_urgent: Callable[[], bool] = lambda: False) -> None:
        if self._details is None and not self._is_lost:  # who does not answer cannot be asked to end it
            self.stop(is_urgent)
        self._end_log()

    def _end_log(self) -> None:
        """The last lines; the first one may be among them, which says where the registry is."""
        if self._tail is not None:
            self._tail.join(LOG_SECONDS)
            self._tail = None
            self._pass_on(is_last=True)

    def _look(self) -> None:
        try:
            details = self.client.get_job_info(self.job)
        except _failures() as error:
            self._is_lost = True
            raise VimeError(
                f"{self.plan.address} does not answer any more: {first_line(error)}", self._hint()
            ) from error
        if details.status.is_terminal():
            self._details = details

    def _hint(self) -> str:
        return f"job {self.job} goes on where it is: ray job stop {self.job} --address {self.plan.address}"

    def _pass_on(self, is_last: bool = False) -> None:
        while True:
            try:
                text = self._lines.get_nowait()
            except queue.Empty:
                break
            *whole, self._rest = (self._rest + text).split("\n")
            for line in whole:
                self._pass_line(line)
        if is_last and self._rest:
            self._pass_line(self._rest)

    def _pass_line(self, line: str) -> None:
        words = line.split()
        if words[:2] == [MARK, self.plan.spec.session]:
            self._connect(self.plan.gcs or words[2])
        elif not line.startswith(f"Running entrypoint for job {self.job}"):
            self.show(line + "\n")

    def _connect(self, address: str) -> None:
        try:
            gcs.client(address)
            self.registry = GcsRegistry(address)
        except VimeError as error:
            self.say(
                f"what stops is told by the job's log alone: {error.message}; give --address HOST:PORT with --submit"
            )

    def _follow(self) -> None:
        """In a thread of its own: the log, piece by piece, until the job has ended."""

        async def follow() -> None:
            async for text in self.client.tail_job_logs(self.job):
                self._lines.put(text)

        try:
            asyncio.run(follow())
        except Exception as error:  # noqa: BLE001 - whatever Ray's client raises; the job itself is looked after elsewhere
            self._lines.put(f"\n{MARK}: the log of the job ends here: {first_line(error)}\n")


def client_of(address: str) -> Any:
    """Ray's client of the jobs at a dashboard. VimeError where there is none."""
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    for name in _CHATTY:
        logging.getLogger(f"ray.{name}").setLevel(logging.WARNING)
    try:
        return JobSubmissionClient(address)
    except AuthenticationError as error:
        text = f"token needed: the cluster at {address} refuses this one, or none"
        raise gcs.TokenNeeded(text, gcs.TOKEN_HINT) from error
    except _failures() as error:
        hint = f"is a dashboard there? It needs ray[default]; with token authentication: {gcs.TOKEN_HINT}"
        raise UsageError(f"{address}: no jobs can be submitted: {first_line(error)}", hint) from error


def entrypoint(plan: Plan) -> str:
    """The job says where its cluster is, then becomes the command."""
    return f'echo {MARK} {shlex.quote(plan.spec.session)} "$RAY_ADDRESS"; exec {plan.command.entrypoint()}'


def stop_job(client: Any, job: str, address: str, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Ask a job to end, and wait until it has. VimeError where it has not in bounded time."""
    by_hand = f"ray job stop {job} --address {address}"
    try:
        client.stop_job(job)
        deadline = time.monotonic() + STOP_SECONDS
        while not client.get_job_info(job).status.is_terminal():
            if time.monotonic() > deadline:
                raise VimeError(f"job {job} did not end within {STOP_SECONDS:g} s", by_hand)
            meanwhile()
            time.sleep(LOOK_SECONDS)
    except _failures() as error:
        raise VimeError(f"job {job} cannot be stopped: {first_line(error)}", by_hand) from error


def _failures() -> tuple[type[Exception], ...]:
    """What Ray's client of jobs raises: of its own, of requests, of its checks."""
    from ray.exceptions import RayError

    return RayError, RuntimeError, OSError, ValueError, TypeError
