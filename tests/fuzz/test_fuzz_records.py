"""A slice of ``make fuzz``, and proof that it finds what it looks for."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "fuzz_records.py"


@pytest.fixture
def fuzz(tmp_path):
    """Runs the script; the inputs that it keeps lie in ``tmp_path``."""

    def run(*arguments):
        command = [sys.executable, str(SCRIPT), *map(str, arguments)]
        environment = os.environ | {"TMPDIR": str(tmp_path)}
        return subprocess.run(command, timeout=240, check=False, capture_output=True, text=True, env=environment)

    return run


def test_mutated_records_are_refused_in_one_line_or_whole(fuzz):
    done = fuzz("--inputs", 200, "--seed", 7)
    assert done.returncode == 0, done.stdout + done.stderr
    accepted, refused = map(
        int, re.search(r"200 inputs in .*: (\d+) accepted, (\d+) refused, 0 FAILED", done.stdout).groups()
    )
    assert accepted > 10
    assert refused > 150


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("code", "did "),
        ("hang", "took more than 0.2 s"),
        ("raise", "raised KeyError"),
        ("memory", "raised MemoryError"),
        ("accept", "raised AttributeError"),
    ],
)
def test_a_reader_with_a_fault_is_found(fuzz, fault, message):
    done = fuzz("--inputs", 12, "--plant", fault, "--limit", 0.2 if fault == "hang" else 10, "--seed", 3)
    assert done.returncode == 1, done.stdout + done.stderr
    assert message in done.stdout
