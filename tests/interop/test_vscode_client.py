"""A stopped process and the client that Microsoft tests debug adapters with: locals, a step, a point of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vime.debug.launch.environment import of_a_process
from vime.debug.stop.records import stops
from vime.debug.stop.registry import FolderRegistry
from vime.debug.stop.spec import Point, Spec

HERE = Path(__file__).parent
PROGRAM = """\
def total(rows):
    found = 0
    for row in rows:
        twice = 2 * row
        found += twice
    return found

print("TOTAL", total([1, 2, 3]))
"""
STOPS_AT, EDITORS_POINT = 4, 6
SECONDS = 120.0


def why_not() -> str:
    if shutil.which("node") is None:
        return "NOT TESTED: node is not installed"
    if not (HERE / "node_modules" / "@vscode" / "debugadapter-testsupport").is_dir():
        return "NOT TESTED: @vscode/debugadapter-testsupport is not installed (make setup, where npm exists)"
    return ""


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "it is there")
def test_microsofts_client_stops_steps_changes_a_variable_and_lets_go(tmp_path):
    file = tmp_path / "work.py"
    file.write_text(PROGRAM)
    registry = FolderRegistry(tmp_path / "registry")
    point = Point("p0", "work.py:4", file=str(file), line=STOPS_AT, condition="row == 2")
    spec = Spec("d-vscode", (point,), folder=registry.where, working_dir=str(tmp_path), wait_seconds=SECONDS)
    command = [sys.executable, "-m", "vime.debug.stop.runner", str(file)]
    environment = of_a_process(os.environ, spec, has_rays_post_mortem=False).value
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + SECONDS
        while not (found := stops(registry, spec.session)) and process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        assert [(stop.file, stop.line) for stop in found] == [(str(file), STOPS_AT)]
        client = ["node", str(HERE / "client.js"), str(found[0].port), str(EDITORS_POINT), "found = 100"]
        done = subprocess.run(client, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, done.stderr
        out, _ = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
        process.wait(SECONDS)
    seen = json.loads(done.stdout)
    first, second, third = seen["stops"]
    assert seen["capabilities"]["supportsConditionalBreakpoints"] is True
    assert [(stop["file"], stop["line"], stop["name"]) for stop in seen["stops"]] == [
        (str(file), STOPS_AT, "total"),
        (str(file), STOPS_AT + 1, "total"),
        (str(file), EDITORS_POINT, "total"),
    ]
    assert (first["locals"]["row"], first["locals"]["found"], first["locals"]["twice"]) == ("2", "2", "2")
    assert second["locals"]["twice"] == "4"
    assert seen["verified"] == [True]
    assert third["reason"] == "breakpoint"
    assert (process.returncode, out) == (0, "TOTAL 110\n")  # 100 + 4 + 6
    assert file.read_text() == PROGRAM
