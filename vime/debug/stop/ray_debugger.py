"""Stops that Ray's own debugger lists: its VS Code extension asks the cluster for workers with paused threads.

A process that is not connected yet joins the cluster of its job, and no other, for as long as it waits: a connection
that stayed would make the program's own ``ray.init`` fail. debugpy listens where Ray would listen: the address of the
node, where everybody who reaches it can run code; nothing in debugpy asks who it is.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from vime.debug.stop import tracing
from vime.debug.stop.say import say
from vime.debug.stop.spec import JOB_CONFIG, Spec
from vime.errors import VimeError


@contextmanager
def waiting(spec: Spec) -> Iterator[tuple[str, int]]:
    """Where this process listens; inside, the cluster says that one of its threads is paused."""
    with _connected():
        import ray

        worker = ray._private.worker.global_worker
        address = ray.util.get_node_ip_address()
        endpoint = tracing.listen(address, spec.ports)
        if worker.debugger_port != endpoint[1]:
            worker.set_debugger_port(endpoint[1])
        with nullcontext() if tracing.is_client_connected() else worker.worker_paused_by_debugger():
            yield endpoint


@contextmanager
def _connected() -> Iterator[None]:
    """Connected to the job's cluster; a connection that is there is used as it is."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        yield
        return
    ray = _join()
    try:
        yield
    finally:
        ray.shutdown()


def _join() -> Any:
    address = os.environ.get("RAY_ADDRESS", "")
    if not address or address == "auto" or "://" in address:
        shown = f"RAY_ADDRESS is {address!r}" if address else "RAY_ADDRESS is not set"
        raise VimeError(
            f"{shown}: Ray's debugger works in the job's own cluster, and none is guessed",
            "submit the job, or set RAY_ADDRESS=HOST:PORT",
        )
    namespace = json.loads(os.environ.get(JOB_CONFIG) or "{}").get("ray_namespace")
    before = {name: os.environ.get(name) for name in ("PYTHONBREAKPOINT",)}
    import ray

    ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="error")
    os.environ.update({name: value for name, value in before.items() if value is not None})
    context = ray.get_runtime_context()
    if (namespace and context.namespace != namespace) or context.gcs_address != address:
        ray.shutdown()
        raise VimeError(
            f"joined {context.gcs_address}, namespace {context.namespace!r}, instead of {address}, {namespace!r}",
            "is another cluster on this machine?",
        )
    nodes = sum(node["Alive"] for node in ray.nodes())
    say(f"joined the job's cluster at {address} for this stop: {nodes} node(s), namespace {context.namespace!r}")
    return ray
