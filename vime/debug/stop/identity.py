"""Who this process is, as far as it knows: its role, its rank, and where it runs."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass

ROLE, RANK = "VIME_ROLE", "VIME_RANK"
ROLES = ("driver", "trainer", "engine", "engine core", "reward worker", "worker", "child")
"""``worker``: a process of Ray's that has not said what it is. ``child``: started by another one of the run."""
CHOICES = {"driver": ("driver",), "trainer": ("trainer",), "rollout": ("engine", "engine core", "reward worker")}
"""What ``--role`` takes, beside the roles themselves."""


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


def introduce(role: str, rank: int | None = None) -> None:
    """Say who this process is; what it starts inherits it until it says otherwise."""
    os.environ[ROLE] = role
    os.environ.pop(RANK, None)
    if rank is not None:
        os.environ[RANK] = str(rank)


def whoami() -> Identity:
    """From what was said with ``introduce``, torch.distributed where it is up, the launcher's RANK, and Ray."""
    role, rank = os.environ.get(ROLE, ""), os.environ.get(RANK) or os.environ.get("RANK")
    actor = job = node = ""
    address = "127.0.0.1"
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        # never global_worker.actor_name: it aborts a driver
        context = ray.get_runtime_context()
        is_worker = ray._private.worker.global_worker.mode == ray.WORKER_MODE
        actor = (context.get_actor_name() or context.get_actor_id() or "") if is_worker else ""
        job, node, address = context.get_job_id(), context.get_node_id(), ray.util.get_node_ip_address()
        role = role or ("worker" if is_worker else "driver")
    distributed = sys.modules.get("torch.distributed")
    if RANK not in os.environ and distributed is not None and distributed.is_initialized():
        rank = str(distributed.get_rank())
    number = int(rank) if rank and rank.isdigit() else None
    return Identity(role or "driver", number, os.getpid(), socket.gethostname(), address, actor, job, node)
