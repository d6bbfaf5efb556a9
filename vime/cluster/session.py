"""One Ray cluster for one run: a private one on loopback that ends with the run, or an existing one named explicitly.

Nothing is discovered: without an address a cluster of our own is started, never a neighbour's joined.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vime.cluster.leftovers import make_temp_dir, remove_leftovers
from vime.cluster.signals import daemons_in_own_groups, handler_kept
from vime.config.schema import Config
from vime.debug.everywhere import this_node
from vime.debug.launch.environment import of_a_job
from vime.debug.processes import Member, Roster, start_ticks
from vime.debug.stop.spec import JOB_CONFIG, current
from vime.errors import UsageError, VimeError, first_line
from vime.reward.breakpoints import RAY_POST_MORTEM, hook_kept, ignore

logger = logging.getLogger(__name__)
END_SECONDS = 10.0
_TOKEN = secrets.token_hex(32)  # one for all private clusters of this process: Ray remembers the first


@dataclass
class RaySession:
    """A connection to Ray and the processes started through it; ``close`` ends every one, in bounded time."""

    address: str
    is_private: bool
    temp_dir: Path | None = None
    processes: set[Process] = field(default_factory=set)
    roster: Roster = field(default_factory=Roster)
    _lock: int | None = None
    _actors: list[Any] = field(default_factory=list)
    _at_start: list[float] = field(default_factory=list)

    @classmethod
    def start(cls, config: Config, roster: Roster | None = None) -> RaySession:
        """``roster``: where to note who is who; None: nowhere that others see."""
        address = config.cluster.ray_address or (os.environ.get("RAY_ADDRESS") if _inside_ray_job() else None)
        if left := remove_leftovers():
            logger.info("removed what killed runs left behind: %s", ", ".join(map(str, left)))
        on_termination = signal.getsignal(signal.SIGTERM)
        try:
            ignore()
            with hook_kept():
                session = cls._connect(address) if address else cls._embedded(config)
            session._at_start = session._devices()
            session.roster = roster or session.roster
            session.roster.write(ray_address=None if session.is_private else session.address)
            if not session.is_private:
                session.introduce([Member.here("driver", node=this_node())])
            return session
        finally:  # ray.init sets a handler of its own, which would end the run before it has cleaned up
            signal.signal(signal.SIGTERM, on_termination)

    @classmethod
    def _embedded(cls, config: Config) -> RaySession:
        # Read by Ray when it is imported: loopback instead of the outer address, and a token nobody else has.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = _TOKEN
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        temp_dir, lock = make_temp_dir()
        session = cls("", is_private=True, temp_dir=temp_dir, _lock=lock)
        try:
            with _temp_files_in(temp_dir), daemons_in_own_groups():
                context = ray.init(
                    address="local",
                    num_cpus=max(os.cpu_count() or 1, num_processes(config)),
                    include_dashboard=False,
                    _temp_dir=str(temp_dir),
                    _node_ip_address="127.0.0.1",
                    object_store_memory=512 << 20,
                    log_to_driver=False,
                    logging_level="error",
                )
        except BaseException as error:  # an interrupt too: half a cluster must not stay
            session.close()
            if isinstance(error, Exception):  # Ray raises nothing more specific
                raise VimeError(
                    f"the private Ray cluster did not come up: {first_line(error)}",
                    f"Ray gives its own processes 30 s: is the machine overloaded, or {temp_dir.parent} full?",
                ) from error
            raise
        session.address = context.address_info["gcs_address"]
        logger.info("private Ray cluster at %s, token authentication", session.address)
        return session

    @classmethod
    def _connect(cls, address: str) -> RaySession:
        if address == "auto":
            raise UsageError("cluster.ray_address = 'auto': vime does not guess", "name the cluster as host:port")
        import ray

        try:
            ray.init(address=address, log_to_driver=False, logging_level="error", runtime_env=_runtime_env())
        except (ConnectionError, ray.exceptions.RayError, RuntimeError) as error:
            raise UsageError(
                f"cluster.ray_address = {address!r}: cannot connect: {first_line(error)}",
                "check the address; with token authentication set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN",
            ) from error
        nodes = len([n for n in ray.nodes() if n["Alive"]])
        logger.info("joined the Ray cluster at %s: %d node(s), %s", address, nodes, ray.cluster_resources())
        return cls(address, is_private=False)

    def start_actor(self, cls: type, name: str, options: dict[str, Any], *args: Any) -> Any:
        """Start ``cls(*args)`` as an actor; it ends with the session."""
        import ray

        actor = ray.remote(cls).options(**options).remote(*args)
        self._actors.append(actor)
        return actor

    def resources(self) -> dict[str, float]:
        """What the cluster has free now, by kind ("CPU", "GPU", ...)."""
        import ray

        return ray.available_resources()

    def watch(self, pids: Iterable[int]) -> None:
        """Processes that must be gone after ``close``. Of a cluster that was joined they may be on another machine,
        where a pid means another process: those Ray ends alone.
        """
        if self.is_private:
            self.processes.update(Process.of(pid) for pid in pids)

    def introduce(self, members: Iterable[Member]) -> None:
        """Note who is who: processes of the run, for whoever wants to know where they are."""
        self.roster.add(members)

    def end(self, actors: Iterable[Any], pids: Iterable[int]) -> None:
        """End some actors alone; ``pids``: their processes, where they are known."""
        import ray

        for actor in actors:
            ray.kill(actor)
            self._actors.remove(actor)
        ended = {process for process in self.processes if process.pid in set(pids)}
        end_processes(ended, END_SECONDS)
        self.processes -= ended

    def end_actors(self) -> None:
        """End what was started so far, and wait until what it held is free, or ``END_SECONDS`` are over."""
        self._kill_actors()
        self.roster.drop("trainer", "engine")
        end_processes(self.processes, END_SECONDS)
        self.processes.clear()
        deadline = time.monotonic() + END_SECONDS
        while self._devices() != self._at_start and time.monotonic() < deadline:
            time.sleep(0.1)  # of a cluster that was joined, others may have taken them

    def _devices(self) -> list[float]:
        """Processors and GPUs that are free."""
        have = self.resources()
        return [round(have.get(kind, 0.0), 3) for kind in ("CPU", "GPU")]

    def _kill_actors(self) -> None:
        import ray

        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()

    def close(self) -> None:
        import ray

        if ray.is_initialized():
            self._kill_actors()
        with handler_kept(signal.SIGTERM):
            ray.shutdown()  # also of what a ray.init that failed has started
        self._actors.clear()
        try:
            end_processes(self.processes, END_SECONDS)
        finally:
            if self.temp_dir is not None:
                shutil.rmtree(self.temp_dir, ignore_errors=True)
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None


@contextmanager
def _temp_files_in(folder: Path) -> Iterator[None]:
    """What is started inside, and everything below it, has its temporary files in ``folder``."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


@dataclass(frozen=True)
class Process:
    """A process of this machine. ``started`` (clock ticks since boot) tells it from a later one with the same pid."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process:
        return cls(pid, start_ticks(pid))

    @property
    def is_alive(self) -> bool:
        return start_ticks(self.pid) == self.started > 0

    def kill(self) -> None:
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def end_processes(processes: Iterable[Process], timeout_seconds: float) -> None:
    """Wait for processes to end, SIGKILL those that have not after a second. Raises if one is there at the end."""
    left = {process for process in processes if process.is_alive}
    start = time.monotonic()
    while left and time.monotonic() - start < timeout_seconds:
        if time.monotonic() - start > 1.0:
            for process in left:
                process.kill()
        time.sleep(0.05)
        left = {process for process in left if process.is_alive}
    if left:
        pids = sorted(process.pid for process in left)
        raise VimeError(f"processes {pids} did not end within {timeout_seconds:g} s of SIGKILL")


def _inside_ray_job() -> bool:
    return JOB_CONFIG in os.environ


def _runtime_env() -> dict[str, Any] | None:
    """What the workers of a cluster that is joined need in a debug run, and do not inherit; a job has it already."""
    spec = current()
    if spec is None or _inside_ray_job():
        return None
    if spec.folder:
        logger.warning("stops on other machines are not seen: the debug run keeps its list in a folder of this one")
    return of_a_job({}, spec, os.environ.get(RAY_POST_MORTEM) == "1").value


def num_processes(config: Config) -> int:
    """Trainer ranks + engine workers of this run."""
    trainers = config.parallel.world_size if config.needs_trainer else 0
    engines = config.rollout.num_engines * config.rollout.engine_tp if config.needs_engines else 0
    return trainers + engines
