"""The options of ``vime rollout --bisect-crash``: what goes together, refused before anything starts."""

from __future__ import annotations

import subprocess
import sys

import pytest


def vime(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vime_cli", "rollout", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--runs", "2"], "--runs: belongs to --bisect-crash"),
        (["--only", "eager"], "--only: belongs to --bisect-crash"),
        (["--bisect-crash", "--save", "x.pt"], "--bisect-crash searches: it does not go with --save"),
        (["--bisect-crash", "--ids", "3"], "--ids 3: belongs to --from-record"),
        (["--bisect-crash", "--inject", "segfault if x"], "'x' is no switch and no number"),
        (["--bisect-crash", "--inject", "nan-weight"], "'nan-weight' is no kind of crash"),
        (["--bisect-crash", "--only", "graphs"], "--only graphs: is no axis"),
        (["--bisect-crash", "--html", "/nowhere/x.html"], "there is no folder /nowhere"),
    ],
)
def test_what_does_not_go_together(arguments, says):
    done = vime("examples/tiny/run.toml", *arguments)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
