"""Options of ``vime debug-attach run``: what is wrong is said at once, with exit code 2, before anything is started."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from vime.debug.attach import clusters
from vime.debug.launch import values
from vime.debug.launch.plan import CLUSTER, HERE, JOB, Asked, plan
from vime.debug.stop.spec import Spec, Who
from vime.errors import ConfigError
from vime_cli.app import app

PROGRAM = '''\
"""Adds."""

def add(a, b):
    total = a + b

    return total

add(1, 2)
'''


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RAY_ADDRESS", "RAY_DEBUG_POSTMORTEM", "RAY_DEBUG_POST_MORTEM", "VIME_DEBUG_SPEC"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    return file


def debug_run(*arguments):
    return CliRunner().invoke(app, ["debug-attach", "run", *arguments])


def asked(**options):
    return Asked(**{"command": (sys.executable, "train.py")} | options)


def test_every_problem_is_said_at_once(program):
    found = debug_run(
        "-b", "nowhere.py:3", "-b", "train.py:99", "-b", "train:ad", "-b", "nomod:f", "-b", "train.py",
        "-b", "train.py:x",
        "--if", "a ==", "--rank", "one", "--role", "trainr", "--hit", "0", "--wait", "soon", "--port", "80",
        "--max-stops", "2", "--submit", "http://h:1", "--local", "--address", "auto", "--runtime-env-json", "{",
        "--", "python3", "-c", "1",
    )  # fmt: skip
    assert found.exit_code == 2
    errors = [line for line in found.stderr.splitlines() if line.startswith("error: ")]
    for text in (
        "there is no file nowhere.py",
        "no statement at or after line 99",
        "no function 'ad'; there are add",
        "there is no module nomod",
        "-b train.py: is neither FILE:LINE nor MODULE:QUALNAME",
        "a file goes with a line number; a function is MODULE:QUALNAME",
        "--if 'a ==': is no Python expression",
        "--rank one: is neither first, nor all, nor ranks",
        "--role trainr: is no role",
        "--hit 0: must be at least 1",
        "--wait soon: is no duration",
        "--port 80: not within 1024-65535",
        "--max-stops: goes with --post-mortem",
        "--submit and --local",
        "-c names no file to stop in",
    ):
        assert any(text in line for line in errors), (text, errors)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"breakpoints": ("train.py:4",), "wait": "5h"}, "--wait 5h: is longer than --hold 4h"),
        ({"condition": "a"}, "--if: goes with a point"),
        ({"hit": 2}, "--hit: goes with a point"),
        ({"is_every": True}, "--every: goes with a point"),
        ({"is_ray_debugger": True}, "--ray-debugger: stops through a cluster"),
        ({"runtime_env": "{}"}, "--runtime-env-json: goes with a job"),
        ({"working_dir": "."}, "--working-dir: goes with a job"),
        ({"submit": "127.0.0.1:8265"}, "--submit 127.0.0.1:8265: is no address of a dashboard"),
        ({"submit": "http://h:1", "runtime_env": "[]"}, "is no JSON object"),
        ({"submit": "http://h:1", "runtime_env": '{"working_dir": "."}', "working_dir": "."}, "has a working_dir"),
        ({"submit": "http://h:1", "working_dir": "nowhere"}, "there is no such folder"),
        ({"address": "auto"}, "vime does not guess"),
        ({"address": "ray://h:1"}, "HOST:PORT"),
        ({"port": "6000-5000"}, "the lower end first"),
        ({"breakpoints": ("train.py:0",)}, "lines count from 1"),
        ({"wait": "1h", "hold": "99999d"}, "--hold 99999d: must not be longer than 365d"),
        ({"submit": "http://"}, "is no address of a dashboard"),
        ({"command": ("/tmp",)}, "/tmp: there is no such program"),
        ({"command": ("",)}, "no command: what shall be run?"),
        ({"command": (sys.executable, "")}, "no program for"),
    ],
)  # fmt: skip
def test_each_problem(program, options, wrong):
    with pytest.raises(ConfigError, match=wrong.replace("?", r"\?")):
        plan(asked(**options), {})


def test_a_run_within_a_run_and_another_cluster_of_the_command_are_refused(program):
    with pytest.raises(ConfigError, match="is a process of a debug run already"):
        plan(asked(), {"VIME_DEBUG_SPEC": "{}"})
    with pytest.raises(ConfigError, match="vime does not guess"):
        plan(asked(), {"RAY_ADDRESS": "auto"})
    words = (sys.executable, "-m", "vime_cli", "train", "--ray-address", "h:2")
    with pytest.raises(ConfigError, match="which cluster"):
        plan(Asked(command=words, address="h:1"), {})


@pytest.mark.parametrize(
    ("options", "environment", "where", "address"),
    [
        ({}, {}, HERE, ""),
        ({}, {"RAY_ADDRESS": "http://h:8265"}, JOB, "http://h:8265"),
        ({"is_local": True}, {"RAY_ADDRESS": "http://h:8265"}, HERE, ""),
        ({"is_local": True}, {"RAY_ADDRESS": "h:6379"}, HERE, ""),
        ({"submit": "https://d:1"}, {"RAY_ADDRESS": "h:6379"}, JOB, "https://d:1"),
        ({}, {"RAY_ADDRESS": "h:6379"}, CLUSTER, "h:6379"),
        ({"address": "h:1"}, {"RAY_ADDRESS": "http://h:8265"}, CLUSTER, "h:1"),
        ({}, {"RAY_ADDRESS": "local"}, HERE, ""),
    ],
)
def test_where_it_runs(program, options, environment, where, address):
    found = plan(asked(**options), environment)
    assert (found.where, found.address) == (where, address)
    assert bool(found.spec.folder) == (where == HERE)
    assert found.spec.gcs == (address if where == CLUSTER else "")
    if where == HERE:
        assert found.environment.get("RAY_ADDRESS") == ("local" if environment else None), "else Ray looks for one"
        assert any("--local joins no" in note for note in found.notes) == bool(options)

    if where == CLUSTER:
        assert found.environment["RAY_ADDRESS"] == address
        assert "vime.debug.stop.worker.set_up" in found.environment["RAY_JOB_CONFIG_JSON_ENV_VAR"]
    if where == JOB:
        assert found.environment == {}
        assert found.runtime_env["worker_process_setup_hook"] == "vime.debug.stop.worker.set_up"


def test_a_cluster_that_ray_would_find_is_named(program, monkeypatch):
    """Cases D11 and D12: points are only where the debug run was announced."""
    monkeypatch.setenv("RAY_TMPDIR", str(program.parent))
    file = program.parent / "ray" / "ray_current_cluster"
    code = "from ray._private.utils import get_ray_address_file; print(get_ray_address_file(None))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str(file)
    file.parent.mkdir()
    file.write_text("10.0.0.1:6379")
    found: list[clusters.Cluster] = []
    monkeypatch.setattr(clusters, "local_clusters", lambda: found)

    def notes(**options):
        given = plan(asked(**options), {"RAY_TMPDIR": str(program.parent)})
        return [note for note in given.notes if "10.0.0.1:6379" in note], given.environment.get("RAY_ADDRESS")

    assert notes() == ([], None), "it is there no more"
    found.append(clusters.Cluster("10.0.0.1:6379", "/tmp/ray", 1, 0.0, "me"))
    text = "Ray's init without an address joins {0}: no points there; --address {0} has them, or --local"
    assert notes() == ([text.format("10.0.0.1:6379")], None)
    assert notes(is_local=True) == ([], "local")


def test_points_say_where_they_landed(program):
    options = {
        "breakpoints": ("train.py:5", "train:add", "__main__:add"),
        "condition": "a",
        "rank": "0,2",
        "role": "trainer",
    }
    found = plan(asked(**options, port="5678-5700", wait="1h30m", hit=3, is_every=True), {})
    assert "p0 train.py:5 moved to 6, the first statement there in add" in found.notes
    assert "p1 train.py:4 in add" in found.notes
    spec = found.spec
    assert [(p.id, p.line, p.qualname, p.module) for p in spec.points] == [
        ("p0", 5, "", ""), ("p1", 0, "add", "train"), ("p2", 0, "add", "__main__")
    ]  # fmt: skip
    assert spec.points[0].file == str(program)
    assert {p.who for p in spec.points} == {Who(("trainer",), (0, 2))}
    assert {(p.condition, p.hit, p.is_every) for p in spec.points} == {("a", 3, True)}
    assert (spec.ports, spec.wait_seconds, spec.working_dir) == ((5678, 5700), 5400.0, str(program.parent))
    assert Spec.loads(spec.dumps()) == spec
    assert program.read_text() == PROGRAM


def test_a_point_in_the_file_that_the_program_is_a_link_to(program):
    (program.parent / "start.py").symlink_to("train.py")
    found = plan(Asked(command=(sys.executable, "start.py"), breakpoints=("train.py:4",)), {})
    assert found.spec.points[0].file == str(program.parent / "start.py")
    assert "p0 start.py:4 in add" in found.notes


def test_what_cannot_be_read_is_a_problem_like_others(program, monkeypatch):
    from pathlib import Path

    def refuse(file):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=r"train\.py: cannot be read: Permission denied"):
        plan(asked(breakpoints=("train.py:4",), hit=0), {})


@pytest.mark.parametrize(
    ("config", "wrong"),
    [("{", "is no JSON"), ("[]", "is no JSON object"), ('{"runtime_env": {"env_vars": {"A": 1}}}', "must be a string")],
)
def test_a_job_config_that_cannot_be_merged(program, config, wrong):
    with pytest.raises(ConfigError, match=f"RAY_JOB_CONFIG_JSON_ENV_VAR: .*{wrong}"):
        plan(asked(address="h:1"), {"RAY_JOB_CONFIG_JSON_ENV_VAR": config})


@pytest.mark.parametrize(
    ("node", "before", "value"), [("127.0.0.1", None, "0"), ("127.0.0.1", "1", "1"), ("10.0.0.1", None, None)]
)
def test_a_cluster_on_loopback_is_looked_for_there(program, monkeypatch, node, before, value):
    """Ray would look for it at the machine's outer address; where its nodes have that one, it should."""
    name = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    found = [clusters.Cluster(f"{node}:6379", "/tmp/ray", 1, 0.0, "me")]
    monkeypatch.setattr(clusters, "local_clusters", lambda: found)
    planned = plan(asked(address="localhost:6379"), {name: before} if before else {})
    assert planned.environment.get(name) == value
    assert any(name in note for note in planned.notes) == (value == "0")


@pytest.mark.parametrize("where", ["environment", "job"])
def test_the_guides_variable_is_taken_as_post_mortem_with_one_notice(program, where):
    """Case D02."""
    variable = {"RAY_DEBUG_POSTMORTEM": "1"}
    if where == "environment":
        found = plan(asked(), variable)
        env = found.environment
    else:
        found = plan(asked(submit="http://h:1", runtime_env='{"env_vars": {"RAY_DEBUG_POSTMORTEM": "1"}}'), {})
        env = found.runtime_env["env_vars"]
    assert found.spec.post_mortem == Who(is_first=True)
    assert env["RAY_DEBUG_POST_MORTEM"] == "1"
    assert sum("RAY_DEBUG_POSTMORTEM is a name that Ray does not read" in note for note in found.notes) == 1
    plain = plan(asked(is_post_mortem=True), {})
    assert plain.spec.post_mortem is not None
    assert "RAY_DEBUG_POST_MORTEM" not in plain.environment


def test_nothing_to_stop_at_is_allowed_and_said(program):
    found = plan(asked(), {})
    assert any("what stops is breakpoint() in the program itself" in note for note in found.notes)


@pytest.mark.parametrize(
    ("source", "options", "is_said"),
    [
        ("print(1)", {}, False),
        ("import torch.distributed", {}, True),
        ("print(1)", {"rank": "all"}, True),
        ("print(1)", {"submit": "http://h:1"}, True),
        ("import torch.distributed", {"wait": "9m"}, False),
    ],
)
def test_the_time_outs_of_collectives_are_said_where_there_may_be_some(program, source, options, is_said):
    program.write_text(source)
    for words in ((sys.executable, "train.py"), (sys.executable, "-m", "train")):
        notes = plan(Asked(command=words, **options), {}).notes
        assert any("torch.distributed gives up after NCCL 10m < --wait 30m" in note for note in notes) == is_said
    assert not any("gives up" in note for note in plan(Asked(command=("vime", "train"), **options), {}).notes)


def test_an_interpreter_without_vime_is_refused(program, tmp_path):
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'vime'\" >&2\nexit 1\n")
    other.chmod(0o755)
    with pytest.raises(ConfigError, match=r"No module named 'vime'; give .* instead"):
        plan(Asked(command=(str(other), "train.py")), {})


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("1.5h", 5400), ("1h30m", 5400), ("2d", 172800), ("0.5s", 0.5)]
)
def test_durations(text, seconds):
    assert values.duration(text, "--wait") == seconds


@pytest.mark.parametrize("text", ["", "0", "-1s", "1w", "1h30", "m", "1 h", "nan", "inf"])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match="--wait"):
        values.duration(text, "--wait")


def test_roles_ranks_and_ports():
    assert values.ranks("first") == (None, True)
    assert values.ranks("all") == (None, False)
    assert values.ranks("1, 0,1") == ((0, 1), False)
    assert values.roles("") == ()
    assert values.roles("rollout") == ("engine", "engine core", "reward worker")
    assert values.roles("engine-core,driver") == ("engine core", "driver")
    assert values.ports("") == (0, 0)
    assert values.ports("5678") == (5678, 5678)
    for text in ("x", "5678-", "-5", "70000"):
        with pytest.raises(ValueError, match="--port"):
            values.ports(text)


def test_what_follows_the_command_is_the_commands(program):
    found = debug_run("-b", "nowhere.py:1", sys.executable, "train.py", "--rank", "x", "-b", "y")
    assert [line for line in found.stderr.splitlines() if line.startswith("error: ")] == [
        "error: -b nowhere.py:1: there is no file nowhere.py"
    ]
