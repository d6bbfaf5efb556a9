"""What a Ray worker of a debug run does at its start: the ``worker_process_setup_hook`` of the job."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from typing import Any

from vime.debug.stop import boot
from vime.debug.stop.registry import registry_of
from vime.debug.stop.spec import Spec, current
from vime.reward.breakpoints import DEBUG_SPEC, RAY_POST_MORTEM

USERS_SETUP_HOOK = "VIME_DEBUG_SETUP_HOOK"
"""Holds the ``worker_process_setup_hook`` of the job itself, which is called after ours."""
PROOF = "note/post-mortem"
"""In the registry, below the session: by the first worker of each of Ray's jobs, where Ray's variable is asked for."""


def set_up() -> None:
    """Take up the debug run, say what this worker sees of Ray's own variable, then call the job's own hook."""
    boot.install()
    if (spec := current()) is not None:
        prove(know_cluster(spec))
    if name := os.environ.get(USERS_SETUP_HOOK):
        module, _, function = name.rpartition(".")
        getattr(importlib.import_module(module), function)()


def know_cluster(spec: Spec) -> Spec:
    """A submitted job names no registry: it is its own cluster's, for the children of this process as well."""
    if spec.folder or spec.gcs:
        return spec
    import ray

    known = replace(spec, gcs=ray.get_runtime_context().gcs_address)
    os.environ[DEBUG_SPEC] = known.dumps()
    return known


def prove(spec: Spec) -> None:
    """Case D02: a worker itself says that it has Ray's variable."""
    import ray

    value = os.environ.get(RAY_POST_MORTEM)
    if value is None:
        return
    context = ray.get_runtime_context()
    found: dict[str, Any] = {"value": value, "pid": os.getpid(), "address": ray.util.get_node_ip_address()}
    registry_of(spec).claim(f"{spec.session}/{PROOF}/{context.get_job_id()}", found)
