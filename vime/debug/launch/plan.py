"""From the options of ``vime debug-attach run`` to what will be started: every problem is found before that."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from vime.debug.attach import clusters
from vime.debug.launch import environment, values
from vime.debug.launch.command import WHAT_WORKS, Command, parse, problems_here
from vime.debug.launch.points import When, condition_problem, module_folders, place, program_file
from vime.debug.stop import registry
from vime.debug.stop.spec import JOB_CONFIG, Point, Spec, Who
from vime.errors import ConfigError, UsageError
from vime.reward.breakpoints import DEBUG_SPEC, GUIDES_POST_MORTEM

HERE, CLUSTER, JOB = "on this machine", "in the cluster", "as a job"
_URL = re.compile(r"https?://[^/:?#]+|https?://\[")
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Asked:
    """The options as they were given, see ``vime debug-attach run --help``."""

    command: tuple[str, ...] = ()
    breakpoints: tuple[str, ...] = ()
    condition: str = ""
    rank: str = "first"
    role: str = ""
    hit: int | None = None
    is_every: bool = False
    is_post_mortem: bool = False
    max_stops: int | None = None
    wait: str = "30m"
    hold: str = "4h"
    port: str = ""
    is_ray_debugger: bool = False
    submit: str = ""
    is_local: bool = False
    address: str = ""
    runtime_env: str = ""
    working_dir: str = ""


@dataclass(frozen=True)
class Plan:
    """What will be started.

    where        HERE, CLUSTER (a driver on this machine that joins one) or JOB
    address      of the dashboard for a job, of the GCS for a cluster; "" here
    gcs          of a job's cluster as this machine reaches it, where that was said; else the job says its own
    environment  of the driver on this machine
    runtime_env  of the job
    notes        to be said before the start, in order
    """

    spec: Spec
    command: Command
    where: str
    address: str = ""
    gcs: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    runtime_env: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass
class _Problems:
    """Collects what is wrong, to be said at once, also what cannot be read."""

    found: list[str] = field(default_factory=list)

    def try_(self, make: Callable[[], _Value], instead: _Value) -> _Value:
        """``make()``, or ``instead`` where it raises ValueError, UsageError or OSError."""
        try:
            return make()
        except UsageError as error:
            self.found += error.message.splitlines()
        except ValueError as error:
            self.found.append(str(error))
        except OSError as error:
            self.found.append(f"{error.filename}: cannot be read: {error.strerror}")
        return instead


def plan(asked: Asked, env: Mapping[str, str] = os.environ) -> Plan:
    """ConfigError with all problems of what was asked for."""
    problems = _Problems()
    command = problems.try_(lambda: parse(asked.command, env), None)
    where, address = problems.try_(lambda: _where(asked, command, env), (HERE, ""))
    job = _runtime_env(asked, where, problems)
    variable = environment.post_mortem_name(env, job)
    spec, places = _spec(asked, command, env, bool(variable), problems)
    if command is not None:
        problems.found += problems_here(command) if where != JOB else []
    if spec.is_ray_debugger and where == HERE:
        problems.found.append("--ray-debugger: stops through a cluster: give --submit URL or --address HOST:PORT")
    if where == CLUSTER:
        problems.found += environment.job_config_problems(env.get(JOB_CONFIG, ""))
    if env.get(DEBUG_SPEC):
        problems.found.append("this is a process of a debug run already: the command would belong to both")
    if problems.found or command is None:
        hint = WHAT_WORKS if command is None else "nothing was started"
        raise ConfigError(list(dict.fromkeys(problems.found)), hint)
    if os.path.isdir(folder := str(job.get("working_dir", ""))):
        spec = replace(spec, working_dir=os.path.abspath(folder))
    spec = _with_registry(spec, where, address)
    has_rays = bool(variable) or (spec.is_ray_debugger and spec.post_mortem is not None)
    notes = (*_headline(spec, command, where, address), *places, *_remarks(spec, variable))
    if where != HERE or _may_have_ranks(asked, command, env):
        notes += environment.collectives(spec, command)
    if where == JOB:
        merged = environment.of_a_job(job, spec, has_rays)
        gcs = asked.address
        return Plan(spec, command, where, address, gcs, {}, merged.value, (*notes, *merged.notes))
    found, of_env = _environment(env, spec, where, has_rays, asked.is_local)
    return Plan(spec, command, where, address, address, found, {}, (*notes, *of_env))


def _where(asked: Asked, command: Command | None, env: Mapping[str, str]) -> tuple[str, str]:
    """(HERE, CLUSTER or JOB, its address)."""
    if asked.submit and asked.is_local:
        raise ValueError("--submit and --local: a job is not local")
    given = env.get(clusters.ADDRESS, "")
    named = command.ray_address() if command is not None else ""
    url = asked.submit or (given if given.startswith(("http://", "https://")) else "")
    if url and not asked.is_local and (asked.submit or not asked.address):
        if not _URL.match(url):
            raise ValueError(f"--submit {url}: is no address of a dashboard, such as http://127.0.0.1:8265")
        if asked.address:
            clusters.checked(asked.address, "--address")
        return JOB, url
    for name, address in (("--address", asked.address), ("--ray-address", named)):
        if address and address != clusters.LOCAL:
            clusters.checked(address, name)
    if asked.address and named and asked.address != named:
        raise ValueError(f"--address {asked.address} and the command's {named}: which cluster?")
    address = asked.address or named or ("" if asked.is_local or url else given)
    if not address or address == clusters.LOCAL:
        return HERE, ""
    return CLUSTER, clusters.checked(address, clusters.ADDRESS)


def _runtime_env(asked: Asked, where: str, problems: _Problems) -> dict[str, Any]:
    if where != JOB:
        for option, value in (("--runtime-env-json", asked.runtime_env), ("--working-dir", asked.working_dir)):
            if value:
                problems.found.append(f"{option}: goes with a job (--submit URL)")
        return {}
    try:
        found = json.loads(asked.runtime_env or "{}")
    except ValueError as error:
        problems.found.append(f"--runtime-env-json: is no JSON: {error}")
        return {}
    wrong = list(environment.problems(found, "--runtime-env-json"))
    problems.found += wrong
    if wrong:
        return {}
    if asked.working_dir:
        if "working_dir" in found:
            problems.found.append("--working-dir: --runtime-env-json has a working_dir already")
        elif not os.path.isdir(asked.working_dir):
            problems.found.append(f"--working-dir {asked.working_dir}: there is no such folder")
        found["working_dir"] = os.path.abspath(asked.working_dir)
    return found


def _spec(
    asked: Asked, command: Command | None, env: Mapping[str, str], is_by_variable: bool, problems: _Problems
) -> tuple[Spec, list[str]]:
    any_rank: tuple[tuple[int, ...] | None, bool] = (None, False)
    ranks, is_first = problems.try_(lambda: values.ranks(asked.rank), any_rank)
    who = Who(problems.try_(lambda: values.roles(asked.role), ()), ranks, is_first)
    points, places = _points(asked, command, env, who, problems)
    wait = problems.try_(lambda: values.duration(asked.wait, "--wait"), 1.0)
    hold = problems.try_(lambda: values.duration(asked.hold, "--hold"), 0.0)
    if 0 < hold < wait:
        problems.found.append(f"--wait {asked.wait}: is longer than --hold {asked.hold}, for which the others wait")
    for option, number in (("--hit", asked.hit), ("--max-stops", asked.max_stops)):
        if number is not None and number < 1:
            problems.found.append(f"{option} {number}: must be at least 1")
    post_mortem = who if asked.is_post_mortem or is_by_variable else None
    if asked.max_stops is not None and post_mortem is None:
        problems.found.append("--max-stops: goes with --post-mortem")
    spec = Spec(
        session=f"d-{secrets.token_hex(3)}",
        points=tuple(points),
        post_mortem=post_mortem,
        max_stops=asked.max_stops or 1,
        wait_seconds=wait,
        hold_seconds=hold,
        ports=problems.try_(lambda: values.ports(asked.port), (0, 0)),
        working_dir=os.getcwd(),
        is_ray_debugger=asked.is_ray_debugger,
        breakpoints=replace(who, is_first=False),
    )
    return spec, places


def _points(
    asked: Asked, command: Command | None, env: Mapping[str, str], who: Who, problems: _Problems
) -> tuple[list[Point], list[str]]:
    if asked.condition and (wrong := condition_problem(asked.condition)):
        problems.found.append(wrong)
    if not asked.breakpoints:
        given = {"--if": asked.condition, "--hit": asked.hit, "--every": asked.is_every}
        problems.found += [f"{option}: goes with a point (-b)" for option, value in given.items() if value]
    when = When(asked.condition, who, asked.hit or 1, asked.is_every)
    folders = module_folders(command, env)
    points, places = [], []
    for number, text in enumerate(asked.breakpoints):
        placed = problems.try_(lambda n=number, t=text: place(n, t, when, folders, command), None)  # type: ignore[misc]
        if placed is not None:
            points.append(placed.point)
            places.append(placed.place)
    return points, places


def _with_registry(spec: Spec, where: str, address: str) -> Spec:
    if where == HERE:
        return replace(spec, folder=str(registry.root()))
    return replace(spec, gcs=address) if where == CLUSTER else spec


def _environment(
    env: Mapping[str, str], spec: Spec, where: str, has_rays_post_mortem: bool, is_local: bool
) -> tuple[dict[str, str], tuple[str, ...]]:
    merged = environment.of_a_process(env, spec, has_rays_post_mortem)
    found, notes = dict(merged.value), merged.notes
    if where == HERE:
        return found, (*notes, *_stays_here(found, is_local))
    config = environment.job_config(env.get(JOB_CONFIG, ""), spec, has_rays_post_mortem)
    found |= config.value | {clusters.ADDRESS: spec.gcs}
    if clusters.KEEP_LOOPBACK not in env and clusters.is_on_loopback(spec.gcs):
        found[clusters.KEEP_LOOPBACK] = "0"
        notes = (*notes, f"{clusters.KEEP_LOOPBACK}=0 is set: the cluster is on loopback, and Ray would look elsewhere")
    return found, tuple(dict.fromkeys((*notes, *config.notes)))


def _stays_here(found: dict[str, str], is_local: bool) -> list[str]:
    """Without an address Ray joins a cluster that it finds: with ``--local`` it does not; else it is said."""
    before = found.get(clusters.ADDRESS, "")
    if is_local:
        found[clusters.ADDRESS] = clusters.LOCAL
        is_other = before not in ("", clusters.LOCAL)
        return [f"{clusters.ADDRESS}={clusters.LOCAL} for the program: --local joins no cluster"] if is_other else []
    if before or not (there := clusters.found_by_ray(found)):
        return []
    return [f"Ray's init without an address joins {there}: no points there; --address {there} has them, or --local"]


def _headline(spec: Spec, command: Command, where: str, address: str) -> list[str]:
    at = f" at {address}" if address else ""
    return [f"debug run {spec.session} {where}{at}: {shlex.join(command.words)}"]


def _remarks(spec: Spec, variable: str) -> list[str]:
    found = []
    if variable == GUIDES_POST_MORTEM:
        found.append(
            f"{variable} is a name that Ray does not read: taken as --post-mortem, and Ray's own "
            f"{environment.RAY_POST_MORTEM}=1 is set for the driver and the workers"
        )
    elif variable:
        found.append(f"{variable} is taken as --post-mortem")
    if not spec.points and spec.post_mortem is None:
        found.append("no point (-b) and no --post-mortem: what stops is breakpoint() in the program itself")
    return found


def _may_have_ranks(asked: Asked, command: Command, env: Mapping[str, str]) -> bool:
    """Whether a program of this machine may wait in collectives: ranks are asked for, or its source names torch."""
    file = program_file(command, module_folders(command, env))
    return asked.rank != "first" or (file is not None and b"torch" in file.read_bytes())
