"""What a Ray worker of a debug run does at its start: the ``worker_process_setup_hook`` of the job.

And what its driver does where the program's own ``ray.init(runtime_env=...)`` names something that the debug run has
set as well: Ray would refuse to start (case D09).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vime.debug.stop import boot
from vime.debug.stop.registry import registry_here
from vime.debug.stop.say import say
from vime.debug.stop.spec import Spec, current
from vime.reward.breakpoints import DEBUG_SPEC, HOOK, RAY_POST_MORTEM

USERS_SETUP_HOOK = "VIME_DEBUG_SETUP_HOOK"
"""Holds the ``worker_process_setup_hook`` of the job itself, which is called after ours."""
SITE = Path(__file__).with_name("site")
"""Folder with the ``sitecustomize`` that prepares every Python process."""
PATH, SETUP_HOOK = "PYTHONPATH", "worker_process_setup_hook"
RAYS_SETUP_HOOK = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
RAISED = "VIME_DEBUG_RAISED"
"""Names of the variables that the debug run has set to let others wait: the program's own value wins."""
PROOF = "note/post-mortem"
"""In the registry, below the session: by the first worker of each of Ray's jobs, where Ray's variable is asked for."""


def set_up() -> None:
    """Take up the debug run, say what this worker sees of Ray's own variable, then call the job's own hook."""
    try:
        _take_up()
    except Exception as error:  # noqa: BLE001 - a fault of ours must not keep Ray's worker from starting
        say(f"worker {os.getpid()} of the debug run: {type(error).__name__}: {error}")
    if name := os.environ.get(USERS_SETUP_HOOK):
        module, _, function = name.rpartition(".")
        getattr(importlib.import_module(module), function)()


def _take_up() -> None:
    boot.install()
    parts = os.environ.get(PATH, "").split(os.pathsep)
    if str(SITE) not in parts:  # an actor with a PYTHONPATH of its own: its children are of the run too
        os.environ[PATH] = os.pathsep.join([str(SITE), *filter(None, parts)])
    if (spec := current()) is not None:
        prove(know_cluster(spec))


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
    registry_here(spec).claim(f"{spec.session}/{PROOF}/{context.get_job_id()}", found)


def patch_merge(module: Any) -> None:
    """``module``: ray._private.worker, whose ``init`` merges the environment of the job with that of the program."""
    merge = module._merge_runtime_env

    def merge_without_collisions(job: Any, program: Any, override: bool = False) -> Any:
        return merge(*without_collisions(job or {}, program or {}), override)

    module._merge_runtime_env = merge_without_collisions


def without_collisions(job: Mapping[str, Any], program: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both runtime environments, so that what the debug run has set is in one of them alone. Other collisions stay:
    they would be there without a debug run. ``job``: with the debug run's settings.
    """
    mine, theirs = dict(job), dict(program)
    ours, own = dict(mine.get("env_vars") or {}), dict(theirs.get("env_vars") or {})
    hook = theirs.get(SETUP_HOOK)
    if hook is not None and mine.get(SETUP_HOOK) and USERS_SETUP_HOOK not in ours:
        ours.pop(RAYS_SETUP_HOOK, None)
        if isinstance(hook, str):
            ours[USERS_SETUP_HOOK] = hook
            del theirs[SETUP_HOOK]
        else:
            del mine[SETUP_HOOK]
            theirs[SETUP_HOOK] = _both(hook)
    if PATH in own and ours.get(PATH, "").startswith(str(SITE)):
        own[PATH] = os.pathsep.join([str(SITE), own[PATH]])
        del ours[PATH]
    for name in sorted(set(ours) & set(own) & set(ours.get(RAISED, "").split(","))):
        say(f"{name}={own[name]} of the program's ray.init is kept; the debug run had raised it to {ours.pop(name)}")
    for name in (DEBUG_SPEC, HOOK):
        own.pop(name, None)
    for merged, variables in ((mine, ours), (theirs, own)):
        if variables or "env_vars" in merged:
            merged["env_vars"] = variables
    return mine, theirs


def _both(hook: Any) -> Any:
    """Ours, then the program's: shipped by value."""

    def set_up_both() -> None:
        set_up()
        hook()

    return set_up_both
