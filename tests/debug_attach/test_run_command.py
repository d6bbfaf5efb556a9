"""Which programs a debug run can start, and as what."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from vime.debug.launch.command import RUNNER, parse
from vime.debug.launch.plan import Asked, plan
from vime.debug.stop.spec import Who

RUN = ("-m", RUNNER)


@pytest.mark.parametrize(
    ("words", "here"),
    [
        ("python3 train.py --lr 1", ("python3", *RUN, "train.py", "--lr", "1")),
        ("python -u -X dev train.py -m x", ("python", "-u", "-X", "dev", *RUN, "train.py", "-m", "x")),
        ("/usr/bin/python3.11 -m pkg.mod -c 1", ("/usr/bin/python3.11", *RUN, "-m", "pkg.mod", "-c", "1")),
        ("train.py a", (sys.executable, *RUN, "train.py", "a")),
    ],
)  # fmt: skip
def test_the_runner_comes_before_the_program(words, here):
    command = parse(words.split())
    assert command.here() == here
    assert shlex.split(command.entrypoint()) == [*(["python3"] if here[0] == sys.executable else here[:1]), *here[1:]]


def test_an_entrypoint_is_quoted_for_the_shell():
    argument = "it's; rm -rf $HOME {\n}"
    assert shlex.split(parse(["python3", "train.py", argument]).entrypoint())[-1] == argument


@pytest.mark.parametrize(
    "first_lines",
    [
        f"#!{sys.executable}\n",
        "#!/usr/bin/env python3\n",
        f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n",
    ],
)
def test_console_scripts(tmp_path, first_lines):
    script = tmp_path / "tool"
    script.write_text(f"{first_lines}import sys\n")
    script.chmod(0o755)
    command = parse(["tool", "x"], {"PATH": str(tmp_path)})
    assert command.here()[1:] == (*RUN, str(script), "x")
    assert Path(command.here()[0]).name in (Path(sys.executable).name, "python3")
    assert command.entrypoint() == "tool x"  # the one that is found there


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ([], "no command"),
        (["python3"], "no program for python3"),
        (["python3", "-c", "1"], "-c names no file"),
        (["python3", "-m"], "which module?"),
        (["python3", "-uI", "a.py"], "-I ignores PYTHONPATH"),
        (["python3", "-S", "a.py"], "-S leaves out sitecustomize"),
        (["python3", "-"], "standard input"),
        (["bash", "run.sh"], "is no program of a Python package"),
        (["no-such-program"], "there is no such program"),
    ],
)
def test_what_is_no_python_program_is_refused(words, wrong):
    with pytest.raises(ValueError, match=wrong.replace("?", r"\?")):
        parse(words)


@pytest.mark.parametrize(
    ("words", "address"),
    [
        ("--ray-address h:1", "h:1"),
        ("--ray-address=h:1", "h:1"),
        ('run.toml cluster.ray_address="h:1"', "h:1"),
        ("run.toml", ""),
    ],
)
def test_the_cluster_that_a_command_of_vime_joins(words, address):
    assert parse(["python3", "-m", "vime_cli", "train", *words.split()]).ray_address() == address


@pytest.mark.parametrize(("rank", "who"), [("first", Who(("trainer",))), ("1", Who(("trainer",), (1,)))])
def test_ranks_and_roles_also_choose_who_stops_at_a_breakpoint(tmp_path, rank, who):
    (tmp_path / "work.py").write_text("breakpoint()\n")
    asked = Asked((sys.executable, str(tmp_path / "work.py")), rank=rank, role="trainer")
    assert plan(asked, {}).spec.breakpoints == who
