"""Who this process is, as far as it knows: its role, its rank, and where it runs."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from dataclasses import dataclass

from vime.debug.stop.spec import Who
from vime.reward.role import CHILD_RANK, CHILD_ROLE, PID, RANK, ROLE
from vime.reward.role import children_are as children_are
from vime.reward.role import introduce as introduce

ROLES = ("driver", "trainer", "engine", "engine core", "reward worker", "worker", "child")
"""``worker``: a process of Ray's that has not said what it is. ``child``: started by another one of the run."""
CHOICES = {"driver": ("driver",), "trainer": ("trainer",), "rollout": ("engine", "engine core", "reward worker")}
"""What ``--role`` takes, beside the roles themselves."""
_here = {"pid": os.getpid(), "was_distributed": False}
"""The process that loaded this module; of a forked one, whether its parent had its groups before the fork."""


@dataclass(frozen=True)
class Identity:
    """rank: None where there is none. actor: Ray's name or id of the actor. job, node: Ray's ids; "" without Ray."""

    role: str
    rank: int | None
    pid: int
    host: str
    address: str = "127.0.0.1"
    actor: str = ""
    job: str = ""
    node: str = ""

    @property
    def name(self) -> str:
        return self.role if self.rank is None else f"{self.role} {self.rank}"


def whoami() -> Identity:
    """From what was said with ``introduce``, torch.distributed where it is up, the launcher's RANK, and Ray."""
    is_worker, address = False, "127.0.0.1"
    actor = job = node = ""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        # never global_worker.actor_name: it aborts a driver
        context = ray.get_runtime_context()
        is_worker = ray._private.worker.global_worker.mode == ray.WORKER_MODE
        actor = (context.get_actor_name() or context.get_actor_id() or "") if is_worker else ""
        job, node, address = context.get_job_id(), context.get_node_id(), ray.util.get_node_ip_address()
    role, rank = _said(is_worker)
    return Identity(role, rank, os.getpid(), socket.gethostname(), address, actor, job, node)


def is_one_of(me: Identity, who: Who) -> bool:
    """Whether a process is among those that stop."""
    return (not who.roles or me.role in who.roles) and (who.ranks is None or me.rank in who.ranks)


def _said(is_worker: bool) -> tuple[str, int | None]:
    """(role, rank): what was said of this very process, or of those that its parent started, or what it looks like."""
    if os.environ.get(PID) == str(os.getpid()):
        return os.environ[ROLE], _number(os.environ[RANK]) if RANK in os.environ else _launched_rank()
    if role := os.environ.get(CHILD_ROLE):
        return role, _number(os.environ.get(CHILD_RANK))
    is_forked = os.getpid() != _here["pid"]
    if is_worker and not is_forked:
        return "worker", _launched_rank()
    if is_forked or os.environ.get(PID) or multiprocessing.parent_process() is not None:
        return "child", _launched_rank()
    return "driver", _launched_rank()


def _launched_rank() -> int | None:
    """Of a process of a script: its own place among its group's, or what its launcher told it."""
    distributed = sys.modules.get("torch.distributed")  # perhaps in the middle of its import
    if not _here["was_distributed"] and getattr(distributed, "is_initialized", bool)():
        return int(distributed.get_rank())  # type: ignore[union-attr]
    return _number(os.environ.get("RANK"))


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _note_fork() -> None:
    distributed = sys.modules.get("torch.distributed")
    _here["was_distributed"] = getattr(distributed, "is_initialized", bool)()


os.register_at_fork(after_in_child=_note_fork)
