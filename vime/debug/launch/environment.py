"""What the processes of a debug run find in their environment, and how that is merged with what is there already.

Only the variables named here travel to a cluster, never the whole environment (case D13). What the job sets itself
wins and is said (case D09); PYTHONPATH and the setup hook of workers hold both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vime.debug.launch.command import Command
from vime.debug.launch.values import shown
from vime.debug.stop.spec import JOB_CONFIG, Spec
from vime.debug.stop.worker import RAISED, SITE, USERS_SETUP_HOOK
from vime.reward.breakpoints import DEBUG_SPEC, GUIDES_POST_MORTEM, HOOK, RAY_DEBUG, RAY_POST_MORTEM

BREAKPOINT_HOOK = "vime.debug.stop.boot._breakpoint"
SETUP_HOOK = "vime.debug.stop.worker.set_up"
_ELSEWHERE = ("conda", "container", "image_uri", "py_executable", "uv")
OWN_PROGRAM = "vime"
_SWITCHES = ("TORCH_NCCL_ENABLE_MONITORING",)
NCCL_SECONDS, GLOO_SECONDS = 600.0, 1800.0
"""Time-outs of collectives in torch.distributed that a program gets which names none."""


@dataclass(frozen=True)
class Merged:
    """notes: to be said once."""

    value: dict[str, Any]
    notes: tuple[str, ...] = ()


def raised(hold_seconds: float) -> dict[str, str]:
    """Time-outs of libraries for a stopped process. Sources: vllm/envs.py, torch's ProcessGroupNCCL.hpp (2.13)."""
    hold = str(int(hold_seconds))
    return {
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": hold,
        "VLLM_ENGINE_READY_TIMEOUT_S": hold,
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": hold,
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }


def variables(spec: Spec, has_rays_post_mortem: bool) -> dict[str, str]:
    """What only a debug run sets. ``has_rays_post_mortem``: it was asked for by a variable, or with Ray's debugger."""
    found = {DEBUG_SPEC: _unexpandable(spec.dumps()), HOOK: BREAKPOINT_HOOK}
    if spec.is_ray_debugger:
        found[RAY_DEBUG] = "1"
    if has_rays_post_mortem:
        found[RAY_POST_MORTEM] = "1"
    return found


def of_a_process(before: Mapping[str, str], spec: Spec, has_rays_post_mortem: bool) -> Merged:
    """The environment of the command on this machine: all that is there, and ours."""
    found = {**before, **variables(spec, has_rays_post_mortem)}
    found["PYTHONPATH"] = _path_with(before.get("PYTHONPATH", ""))
    kept = _set_missing(found, raised(spec.hold_seconds))
    if not has_rays_post_mortem:
        found.pop(RAY_POST_MORTEM, None)
    return Merged(found, tuple(_timeouts(kept, spec, "the environment")))


def of_a_job(job: Mapping[str, Any], spec: Spec, has_rays_post_mortem: bool) -> Merged:
    """The runtime environment of a job: its own, and ours. ``job``: checked by ``problems``."""
    found = dict(job)
    env = dict(job.get("env_vars", {}))
    ours = variables(spec, has_rays_post_mortem)
    notes = [
        f"the job's own {name}={env[name]} gives way to the debug run's"
        for name in sorted(ours)
        if name in env and env[name] != ours[name] and name != RAY_POST_MORTEM
    ]
    env |= ours
    env["PYTHONPATH"] = _path_with(env.get("PYTHONPATH", "${PYTHONPATH}"))
    kept = _set_missing(env, raised(spec.hold_seconds))
    env[RAISED] = ",".join(name for name in raised(spec.hold_seconds) if name not in kept)
    hook = job.get("worker_process_setup_hook")
    if hook and hook != SETUP_HOOK:
        env[USERS_SETUP_HOOK] = hook
        notes.append(f"the job's own worker_process_setup_hook {hook} is called as well")
    found |= {"env_vars": env, "worker_process_setup_hook": SETUP_HOOK}
    if elsewhere := ", ".join(key for key in _ELSEWHERE if key in job):
        notes.append(f"the job's workers run elsewhere ({elsewhere}): vime and debugpy must be installed there")
    return Merged(found, (*notes, *_timeouts(kept, spec, "the job")))


def job_config(before: str, spec: Spec, has_rays_post_mortem: bool) -> Merged:
    """Value of ``RAY_JOB_CONFIG_JSON_ENV_VAR`` for a driver that joins a cluster; ``before``: the one there, or ""."""
    config = json.loads(before) if before else {}
    merged = of_a_job(config.get("runtime_env") or {}, spec, has_rays_post_mortem)
    value = {**config, "runtime_env": merged.value, "metadata": config.get("metadata") or {}}
    return Merged({JOB_CONFIG: json.dumps(value)}, merged.notes)


def job_config_problems(before: str) -> Iterator[str]:
    """What is wrong with the one that is there."""
    try:
        config = json.loads(before or "{}")
    except ValueError as error:
        yield f"{JOB_CONFIG}: is no JSON: {error}"
        return
    if not isinstance(config, dict):
        yield f"{JOB_CONFIG}: is no JSON object"
        return
    yield from problems(config.get("runtime_env") or {}, JOB_CONFIG)


def problems(job: Any, option: str) -> Iterator[str]:
    """What is wrong with a runtime environment as the user gave it."""
    if not isinstance(job, dict):
        yield f"{option}: is no JSON object"
        return
    env = job.get("env_vars", {})
    if not isinstance(env, dict):
        yield f"{option}: env_vars is no JSON object"
        return
    for name, value in env.items():
        if not isinstance(value, str):
            yield f"{option}: env_vars.{name} = {json.dumps(value)}: must be a string"
    hook = job.get("worker_process_setup_hook", "")
    if not isinstance(hook, str):
        yield f"{option}: worker_process_setup_hook = {json.dumps(hook)}: must be a string such as pkg.mod.function"


def post_mortem_name(environment: Mapping[str, str], job: Mapping[str, Any]) -> str:
    """Variable by which Ray's post mortem was asked for, here or in the job; "" where it was not."""
    for name in (GUIDES_POST_MORTEM, RAY_POST_MORTEM):
        if any(found.get(name, "0") not in ("", "0") for found in (environment, job.get("env_vars", {}))):
            return name
    return ""


def _set_missing(env: dict[str, str], ours: Mapping[str, str]) -> dict[str, str]:
    """Those of ``ours`` that are there with another value and stay."""
    kept = {name: env[name] for name, value in ours.items() if env.get(name, value) != value}
    env.update({name: value for name, value in ours.items() if name not in env})
    return kept


def _timeouts(kept: Mapping[str, str], spec: Spec, whose: str) -> Iterator[str]:
    if len(kept) < len(raised(spec.hold_seconds)):
        yield f"raised to {shown(spec.hold_seconds)} (--hold): the time-outs of vLLM and NCCL"
    for name, value in kept.items():
        seconds = float(value) if value.replace(".", "", 1).isdigit() else 0.0
        is_short = name not in _SWITCHES and seconds < spec.wait_seconds
        shorter = f", shorter than --wait {shown(spec.wait_seconds)}: who waits gives up before" if is_short else ""
        yield f"{name}={value} of {whose} is kept{shorter}"


def collectives(spec: Spec, command: Command) -> tuple[str, ...]:
    """A line on collectives that give up before an unattended stop goes on; none where they hold, as vime's own do."""
    shorter = [
        f"{backend} {shown(seconds)}"
        for backend, seconds in (("NCCL", NCCL_SECONDS), ("gloo", GLOO_SECONDS))
        if seconds < spec.wait_seconds
    ]
    if not shorter or os.path.basename(command.words[0]) == OWN_PROGRAM:
        return ()
    wait = shown(spec.wait_seconds)
    return (f"torch.distributed gives up after {', '.join(shorter)} < --wait {wait}, unless the program sets timeout=",)


def _path_with(before: str) -> str:
    return os.pathsep.join(part for part in (str(SITE), before) if part)


def _unexpandable(text: str) -> str:
    """JSON without "$": Ray expands variables in the values of a runtime environment."""
    return text.replace("$", "\\u0024")
