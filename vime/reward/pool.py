"""RewardPool: worker processes that score samples, each call with a wall-clock limit that nothing can outlast."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

from vime.config import schema
from vime.errors import UsageError, VimeError
from vime.reward.breakpoints import Ignored, held
from vime.reward.registry import needs_label, title
from vime.reward.role import of_child
from vime.reward.worker import START_TIMEOUT_SECONDS, WORKER, Reply, Start
from vime.types import Sample

TIMED_OUT = Reply(problem="timeout")


class RewardPool:
    """Reward over ``reward.num_workers`` processes.

    A call over ``reward.timeout_seconds`` costs its worker's life (SIGKILL; the next call gets a new one); its samples
    get ``reward.score_on_timeout`` and ``metadata["reward_timeout"] = True``, and ``counts["timeout"]`` grows.
    A function that raises, exits, crashes or returns something that is no finite number is a VimeError that names
    sample and function. ``import_paths`` (say, the folder of run.toml) and the current folder are importable in the
    workers. ``ignored`` are breakpoints in the user's modules, which do nothing there.
    """

    def __init__(self, config: schema.Reward, import_paths: Sequence[str] = (), ignored: Ignored = Ignored()) -> None:
        """Starts the first worker, so that a bad function is a UsageError here and not later."""
        self.config = config
        self.counts: Counter[str] = Counter()
        self._start = Start(config, tuple(import_paths), ignored)
        self._lock = threading.Lock()
        self._alive: set[Worker] = set()
        self._is_closed = False
        self._free: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        # Threads only wait for their worker process; a thread of its own per worker keeps the event loop free.
        self._threads = ThreadPoolExecutor(config.num_workers, thread_name_prefix="vime-reward")
        for _ in range(config.num_workers - 1):
            self._free.put(None)  # started when first needed
        try:
            self._free.put(self._new_worker())
        except VimeError:
            self.close()
            raise

    async def score_group(self, samples: Sequence[Sample]) -> list[float | None]:
        """One score per sample, in order; None for aborted and failed samples, and for ``score_on_timeout = None``.

        Extra metrics of a user function land in ``sample.metadata["reward"]``. ``sample.reward`` is left to the caller.
        """
        todo = [s for s in samples if s.status.is_trainable]
        for sample in todo:
            if needs_label(self.config) and sample.label is None:
                raise VimeError(f"{sample.name} has no label; reward {title(self.config)} compares with it")
        calls = [todo] if self.config.per_group and todo else [[s] for s in todo]
        loop = asyncio.get_running_loop()
        results = await asyncio.gather(*(loop.run_in_executor(self._threads, self._call, call) for call in calls))
        scores = {
            id(s): score for call, part in zip(calls, results, strict=True) for s, score in zip(call, part, strict=True)
        }
        return [scores.get(id(s)) for s in samples]

    def score(self, groups: Sequence[Sequence[Sample]]) -> list[list[float | None]]:
        """``score_group`` of every group, at the same time."""

        async def score_all() -> list[list[float | None]]:
            return list(await asyncio.gather(*(self.score_group(group) for group in groups)))

        return asyncio.run(score_all())

    def close(self) -> None:
        """End every worker now, also one in the middle of a call."""
        with self._lock:
            self._is_closed = True
            workers = list(self._alive)
        for worker in workers:
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _call(self, samples: Sequence[Sample]) -> list[float | None]:
        """In a thread: one call in a free worker."""
        worker = self._free.get(timeout=held(START_TIMEOUT_SECONDS))
        try:
            worker = worker or self._new_worker()
            reply = worker.call(samples, self.config.timeout_seconds)
        finally:
            if worker is not None and worker.is_dead:
                self._forget(worker)
                worker = None
            self._free.put(worker)
        if reply is TIMED_OUT:
            self.counts["timeout"] += len(samples)
            for sample in samples:
                sample.metadata = {**sample.metadata, "reward_timeout": True}
            return [self.config.score_on_timeout] * len(samples)
        if reply.problem is not None:
            sample = samples[reply.index]
            raise VimeError(f"reward {title(self.config)} on {sample.name}: {reply.problem}")
        for sample, (_, extras) in zip(samples, reply.values, strict=True):
            if extras:
                sample.metadata = {**sample.metadata, "reward": extras}
        return [value for value, _ in reply.values]

    def _new_worker(self) -> Worker:
        with self._lock:
            if self._is_closed:
                raise VimeError("the reward workers were closed while samples were being scored")
            taken = {worker.rank for worker in self._alive}
            rank = next(number for number in itertools.count() if number not in taken)
            worker = Worker(self._start, rank)
            self._alive.add(worker)
        try:
            worker.wait_until_ready(title(self.config))
        except VimeError:
            self._forget(worker)
            raise
        return worker

    def _forget(self, worker: Worker) -> None:
        worker.kill()
        with self._lock:
            self._alive.discard(worker)


class Worker:
    """One worker process and the two pipes to it."""

    def __init__(self, start: Start, rank: int = 0) -> None:
        """``rank``: its place among the workers."""
        self.rank = rank
        child_reads, we_write = os.pipe()
        we_read, child_writes = os.pipe()
        # The worker finds modules exactly where this process finds them.
        code = f"import sys; sys.path[:] = {sys.path!r}; from vime.reward.worker import main; "
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"{code}main({child_reads}, {child_writes}, {rank})"],
            pass_fds=(child_reads, child_writes),
            env={**os.environ, **of_child(WORKER, rank)},
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a user's function prints is talk, not data
            start_new_session=True,  # Ctrl-C is for the parent alone; it ends its workers itself
        )
        os.close(child_reads)
        os.close(child_writes)
        self._requests = Connection(we_write, readable=False)
        self._replies = Connection(we_read, writable=False)
        self.is_dead = False
        self._is_group_ended = False
        self._send(start)

    def wait_until_ready(self, name: str) -> None:
        """UsageError if the function cannot be loaded; VimeError if the process does not come up."""
        limit = held(START_TIMEOUT_SECONDS)
        reply = self._receive(limit)
        if reply is TIMED_OUT:
            raise VimeError(f"the worker of reward {name} was not ready within {limit:.0f} s")
        if self.is_dead:
            raise VimeError(f"the worker of reward {name} ended while it started: {reply.problem}")
        if reply.problem is not None:
            raise UsageError(reply.problem)

    def call(self, samples: Sequence[Sample], timeout_seconds: float) -> Reply:
        """TIMED_OUT, or the worker's answer, or how it ended. The worker is dead after the first and the last."""
        self._send(list(samples))
        return self._receive(timeout_seconds)

    def kill(self) -> None:
        """SIGKILL it, with all that the function has started, and reap; safe to call twice."""
        self.is_dead = True
        self.process.kill()
        self.process.wait(timeout=START_TIMEOUT_SECONDS)
        self._requests.close()
        if not self._is_group_ended:
            self._is_group_ended = True  # once: later the number may be another group's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # it leads a session of its own

    def _send(self, message: object) -> None:
        try:
            self._requests.send_bytes(pickle.dumps(message))
        except (BrokenPipeError, OSError):
            self.is_dead = True  # _receive finds the end of file and says how it ended

    def _receive(self, timeout_seconds: float) -> Reply:
        try:
            if not self._replies.poll(timeout_seconds):
                self.kill()
                return TIMED_OUT
            return pickle.loads(self._replies.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.is_dead = True
            return Reply(problem=f"ended its process ({_ending(self.process.wait(timeout=START_TIMEOUT_SECONDS))})")


def _ending(returncode: int) -> str:
    return f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
