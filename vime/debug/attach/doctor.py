"""Whether what a debug run stands on is there, before anybody waits for it in vain (cases D05, D06, D20).

``quick`` runs before every sub-command: it reads settings and versions, no cluster. ``examine`` asks everything.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vime.debug.attach import clusters, gcs, launch_json
from vime.debug.stop import registry
from vime.errors import UsageError, VimeError
from vime.reward.breakpoints import GUIDES_POST_MORTEM, HOOK, RAY_DEBUG, RAY_POST_MORTEM

PASS, WARN, FAIL, SKIP = "PASS", "WARN", "FAIL", "SKIP"
COLUMNS = ("check", "verdict", "found", "next step")
DEBUGPY = (1, 8, 0)
_MISSPELT_TEXT = f"{GUIDES_POST_MORTEM} is set, which Ray does not read: its name is {RAY_POST_MORTEM}"
_MISSPELT_HINT = "vime debug-attach run --post-mortem needs neither"
SPY_SECONDS = 20.0
_ATTACHING = ("run", "connect", "pause")
_LOOKING = ("list", "connect")
"""``run`` says it in its own words, and ``doctor`` in its table."""


@dataclass(frozen=True)
class Check:
    """One line of the preflight. ``hint``: what to do; "" where nothing needs to be done."""

    name: str
    verdict: str
    found: str
    hint: str = ""


def quick(command: str, environment: Mapping[str, str] = os.environ) -> list[str]:
    """What is wrong and matters to this sub-command, one line each. No cluster is asked, nothing heavy is loaded."""
    found = [_debugpy()] if command in _ATTACHING else []
    if GUIDES_POST_MORTEM in environment and command in _LOOKING:
        found.append(Check("post-mortem", WARN, _MISSPELT_TEXT, _MISSPELT_HINT))
    return [f"{one.found}; {one.hint}" for one in found if one.verdict in (WARN, FAIL)]


def examine(address: str | None = None, environment: Mapping[str, str] = os.environ) -> list[Check]:
    """Every check, in order."""
    found = [_debugpy(), _ray_default(), _stacks(), _folder()]
    found += _clusters(address, environment)
    return [*found, *_settings(environment), _launch_json(launch_json.DEFAULT)]


def as_number(text: str) -> tuple[int, ...]:
    """ "1.10.0" -> (1, 10, 0): compared as numbers, not as text."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _debugpy() -> Check:
    hint = "pip install 'debugpy>=1.8.0' (also where the processes of the run are)"
    try:
        found = version("debugpy")
    except PackageNotFoundError:
        return Check("debugpy", FAIL, "debugpy is not installed: nothing can be attached to", hint)
    if as_number(found) < DEBUGPY:
        return Check("debugpy", FAIL, f"debugpy {found} is too old, 1.8.0 is the first that works", hint)
    return Check("debugpy", PASS, f"debugpy {found}")


def _ray_default() -> Check:
    try:
        found = version("ray")
    except PackageNotFoundError:
        return Check("ray", WARN, "ray is not installed: only processes without Ray can be debugged", "pip install ray")
    try:
        importlib.import_module("ray.dashboard.optional_deps")
    except ImportError as error:
        text = f"ray {found} without its dashboard ({error}): no ray job submit, and editors list no paused worker"
        return Check(
            "ray", WARN, text, f"pip install 'ray[default]=={found}'; connect prints host, port and launch.json"
        )
    return Check("ray", PASS, f"ray[default] {found}")


def _stacks() -> Check:
    from vime.debug.stacks import py_spy_path

    program = py_spy_path()
    if program is None:
        hint = "pip install py-spy"
        return Check("py-spy", WARN, "py-spy is not installed: stacks only of processes that vime prepared", hint)
    command = [program, "dump", "--pid", str(os.getpid())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SPY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("py-spy", WARN, f"py-spy does not work here: {error}", "stacks asks prepared processes instead")
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it failed"])[-1]
        hint = "allow ptrace (CAP_SYS_PTRACE, kernel.yama.ptrace_scope=0); stacks asks prepared processes instead"
        return Check("py-spy", WARN, f"py-spy may not look into processes: {why}", hint)
    return Check("py-spy", PASS, "py-spy may look into processes")


def _folder() -> Check:
    folder = registry.root()
    if not os.path.lexists(folder):
        return Check("registry", PASS, f"{folder}: no debug run has been here yet")
    try:
        registry.FolderRegistry(folder)
    except VimeError as error:
        return Check("registry", FAIL, error.message, error.hint or "")
    return Check("registry", PASS, f"{folder} is yours alone")


def _clusters(address: str | None, environment: Mapping[str, str]) -> list[Check]:
    found = [_cluster(one) for one in clusters.local_clusters()]
    try:
        target = clusters.chosen(address, environment)
    except UsageError as error:
        is_given = bool(address or environment.get(clusters.ADDRESS))
        verdict = FAIL if is_given else WARN  # nothing is wrong, only a choice open
        return [*found, Check("cluster", verdict, error.message.splitlines()[0], error.hint or "")]
    if target is None:
        return [*found, Check("cluster", SKIP, "no Ray cluster is named, and none is on this machine")]
    state = gcs.state_of(target)
    if state == gcs.TOKEN_NEEDED:
        text = f"token needed: the cluster at {target} is there and refuses this one, or none"
        return [*found, Check("cluster", FAIL, text, gcs.TOKEN_HINT)]
    if state == gcs.NO_CLUSTER:
        text = f"no cluster at {target}: nothing there answers as a GCS"
        return [*found, Check("cluster", FAIL, text, "is the address that of its GCS, and is it up?")]
    text, hint = f"{target} answers{_mode(environment)}", ""
    if environment.get(clusters.KEEP_LOOPBACK) != "0" and clusters.is_on_loopback(target):
        hint = f"{clusters.KEEP_LOOPBACK}=0 for what joins it here, as run sets it: Ray would try an outer address"
    return [*found, Check("cluster", PASS, text, hint), _dashboard(target)]


def _cluster(one: clusters.Cluster) -> Check:
    mode = f"authentication: {one.auth}" if one.auth else "authentication unknown"
    text = f"{one.address} (temp dir {one.temp_dir}, pid {one.pid}, {one.user}, {mode})"
    return Check("found", PASS, text)


def _mode(environment: Mapping[str, str]) -> str:
    return ", with token authentication" if environment.get("RAY_AUTH_MODE") == "token" else ""


def _dashboard(target: str) -> Check:
    try:
        is_there = gcs.has_dashboard(gcs.client(target))
    except VimeError as error:
        return Check("dashboard", FAIL, error.message, error.hint or "")
    if is_there:
        return Check(
            "dashboard", PASS, "the cluster has a dashboard: jobs can be submitted, editors list paused workers"
        )
    text = "it has no dashboard: no ray job submit, and editors list no paused worker"
    return Check("dashboard", WARN, text, "vime debug-attach list and connect work without it")


def _settings(environment: Mapping[str, str]) -> list[Check]:
    found = []
    if GUIDES_POST_MORTEM in environment:
        found.append(Check("post-mortem", WARN, _MISSPELT_TEXT, _MISSPELT_HINT))
    elif environment.get(RAY_POST_MORTEM) == "1":
        text = f"{RAY_POST_MORTEM}=1: every task and actor that fails freezes without a time limit"
        found.append(Check("post-mortem", WARN, text, _MISSPELT_HINT))
    else:
        found.append(Check("post-mortem", PASS, "Ray does not freeze what fails"))
    return [*found, breakpoint_here(environment, sys.stdin is not None and sys.stdin.isatty()), _in_ray(environment)]


def breakpoint_here(environment: Mapping[str, str], has_terminal: bool) -> Check:
    """What ``breakpoint()`` does in a Python process that is started here (case D06)."""
    hook = environment.get(HOOK, "")
    switch = f"unset {HOOK} for pdb, {HOOK}=0 to ignore it; under vime debug-attach run it stops and is listed"
    if hook == "0":
        return Check("breakpoint()", PASS, f"{HOOK}=0: it is ignored", switch)
    if hook.startswith("ray."):
        text = f"{HOOK}={hook}: Ray's hook, which fails before ray.init() and in child processes"
        return Check("breakpoint()", WARN, text, switch)
    if hook:
        return Check("breakpoint()", PASS, f"{HOOK}={hook}: your own hook", switch)
    if has_terminal:
        return Check("breakpoint()", PASS, "opens pdb in this terminal", switch)
    return Check("breakpoint()", WARN, "would open pdb, which fails: standard input is no terminal", switch)


def _in_ray(environment: Mapping[str, str]) -> Check:
    switch = f"{RAY_DEBUG}=legacy: Ray's older debugger (ray debug); {RAY_DEBUG}=0: ignored"
    value = environment.get(RAY_DEBUG, "1")
    if value == "1":
        text = "breakpoint() in tasks and actors of your own waits for an editor, without a time limit (since Ray 2.39)"
        return Check("in Ray", PASS, text, switch)
    if value == "legacy":
        return Check("in Ray", PASS, "breakpoint() in tasks and actors opens Ray's older debugger (ray debug)", switch)
    return Check("in Ray", PASS, f"{RAY_DEBUG}={value}: breakpoint() in tasks and actors is ignored", switch)


def _launch_json(file: Path) -> Check:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        entries: Sequence[object] = content.get("configurations", [])
    except FileNotFoundError:
        return Check("VS Code", SKIP, f"no {file}", "vime debug-attach connect --launch-json writes one")
    except (OSError, ValueError, AttributeError):
        return Check("VS Code", SKIP, f"{file} has comments, or cannot be read: not looked at")
    mine = [e for e in entries if isinstance(e, dict) and e.get("request") == "attach"]
    bad = [str(e.get("name", "?")) for e in mine if e.get("justMyCode", True)]
    if bad:
        text = f"{file}: {', '.join(bad)}: justMyCode is on, as by default: Ray's breakpoint() never stops with it"
        return Check("VS Code", WARN, text, 'add "justMyCode": false')
    return Check("VS Code", PASS, f"{file}: nothing that is known to go wrong")
