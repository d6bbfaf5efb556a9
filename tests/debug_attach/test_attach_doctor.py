"""The preflight: what is missing is said before anybody waits in vain, and nothing is said that does not matter."""

import json
import os
import sys

import pytest
from stops import vime

from vime.debug.attach import doctor
from vime.debug.attach.doctor import FAIL, PASS, SKIP, WARN, as_number, breakpoint_here, examine, quick


def by_name(checks):
    return {check.name: check for check in checks}


def test_here_nothing_is_missing(registry):
    done = vime("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 0
    assert [checks[name]["verdict"] for name in ("debugpy", "ray", "registry")] == [PASS, PASS, PASS]
    assert checks["cluster"]["verdict"] == SKIP
    assert "debugpy" in vime("doctor").stdout


@pytest.mark.parametrize(
    ("found", "verdict"), [("1.7.9", FAIL), ("1.8.0", PASS), ("1.8.22", PASS), ("1.10.0", PASS), ("2.0rc1", PASS)]
)
def test_versions_are_compared_as_numbers(monkeypatch, found, verdict):
    """Ray compares them as text: 1.10.0 would be refused."""
    monkeypatch.setattr(doctor, "version", lambda name: found)
    check = by_name(examine("local", {}))["debugpy"]
    assert check.verdict == verdict
    assert bool(quick("connect", {})) == (verdict == FAIL)
    assert as_number("1.10.0") > as_number("1.8.22")


def test_debugpy_that_is_not_there(monkeypatch):
    def absent(name):
        raise doctor.PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", absent)
    checks = by_name(examine("local", {}))
    assert (checks["debugpy"].verdict, checks["ray"].verdict) == (FAIL, WARN)
    assert "pip install" in quick("run", {})[0]
    assert quick("resume", {}) == quick("stop", {}) == []


def test_ray_without_its_dashboard(monkeypatch):
    """Case D05."""
    monkeypatch.setitem(sys.modules, "ray.dashboard.optional_deps", None)
    check = by_name(examine("local", {}))["ray"]
    assert check.verdict == WARN
    assert "editors list no paused worker" in check.found
    assert "pip install 'ray[default]==" in check.hint
    assert "host, port and launch.json" in check.hint


@pytest.mark.parametrize(
    ("environment", "has_terminal", "verdict", "text"),
    [
        ({}, True, PASS, "opens pdb in this terminal"),
        ({}, False, WARN, "standard input is no terminal"),
        ({"PYTHONBREAKPOINT": "0"}, False, PASS, "ignored"),
        ({"PYTHONBREAKPOINT": "ray.util.rpdb.set_trace"}, True, WARN, "fails before ray.init()"),
        ({"PYTHONBREAKPOINT": "mine.hook"}, False, PASS, "your own hook"),
    ],
)
def test_what_breakpoint_does_here(environment, has_terminal, verdict, text):
    """Case D06: which debugger is active, and how to switch."""
    check = breakpoint_here(environment, has_terminal)
    assert (check.verdict, text in check.found) == (verdict, True)
    assert "PYTHONBREAKPOINT=0" in check.hint


@pytest.mark.parametrize(
    ("value", "text"), [(None, "waits for an editor"), ("legacy", "older debugger"), ("0", "ignored")]
)
def test_what_breakpoint_does_in_ray(value, text):
    """Case D06."""
    check = by_name(examine("local", {} if value is None else {"RAY_DEBUG": value}))["in Ray"]
    assert text in check.found
    assert "RAY_DEBUG=legacy" in check.hint


def test_the_misspelt_variable_is_named_with_the_right_one(registry):
    done = vime("list", env={"RAY_DEBUG_POSTMORTEM": "1"})
    assert done.returncode == 0
    assert "RAY_DEBUG_POSTMORTEM is set, which Ray does not read: its name is RAY_DEBUG_POST_MORTEM" in done.stderr
    assert vime("list").stderr == ""
    assert by_name(examine("local", {"RAY_DEBUG_POSTMORTEM": "1"}))["post-mortem"].verdict == WARN
    freezes = by_name(examine("local", {"RAY_DEBUG_POST_MORTEM": "1"}))["post-mortem"]
    assert (freezes.verdict, "without a time limit" in freezes.found) == (WARN, True)


def test_an_entry_of_vs_code_that_never_stops(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / ".vscode" / "launch.json"
    file.parent.mkdir()
    assert by_name(examine("local", {}))["VS Code"].verdict == SKIP
    entries = [{"name": "mine", "request": "attach"}, {"name": "good", "request": "attach", "justMyCode": False}]
    file.write_text(json.dumps({"configurations": entries}))
    check = by_name(examine("local", {}))["VS Code"]
    assert (check.verdict, "mine" in check.found, "good" in check.found) == (WARN, True, False)
    file.write_text(json.dumps({"configurations": entries[1:]}))
    assert by_name(examine("local", {}))["VS Code"].verdict == PASS
    file.write_text("// mine\n{}")
    assert by_name(examine("local", {}))["VS Code"].verdict == SKIP


def test_a_folder_that_others_can_read_is_refused(registry, monkeypatch):
    registry.folder.chmod(0o755)
    done = vime("doctor")
    assert done.returncode == 1
    assert "is not a folder that is yours alone" in done.stderr
    assert vime("list").returncode == 2
    registry.folder.chmod(0o700)
    registry.folder.rename(registry.folder.with_name("elsewhere"))
    registry.folder.symlink_to("elsewhere")  # planted by somebody else in a folder that all share
    assert by_name(examine("local", {}))["registry"].verdict == FAIL
    registry.folder.unlink()
    registry.folder.with_name("elsewhere").rename(registry.folder)
    assert by_name(examine("local", {}))["registry"].verdict == PASS
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    assert by_name(examine("local", {}))["registry"].verdict == FAIL, "somebody else's"


def test_the_quick_part_asks_nobody(monkeypatch):
    def asked(*_args):
        raise AssertionError("asked")

    monkeypatch.setattr(doctor.gcs, "state_of", asked)
    monkeypatch.setattr(doctor.clusters, "local_clusters", asked)
    for command in ("run", "list", "connect", "resume", "pause", "stop", "stacks", "doctor"):
        assert quick(command, {}) == []


def test_a_py_spy_that_may_not_look(monkeypatch, tmp_path):
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\necho 'Error: Permission denied' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr("vime.debug.stacks.py_spy_path", lambda: str(program))
    check = by_name(examine("local", {}))["py-spy"]
    assert (check.verdict, "Permission denied" in check.found) == (WARN, True)
    monkeypatch.setattr("vime.debug.stacks.py_spy_path", lambda: None)
    assert "not installed" in by_name(examine("local", {}))["py-spy"].found
