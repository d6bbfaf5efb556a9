"""``vime train`` as a user runs it, with the second at which each line of its talk came."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cases import Case
from vime.errors import VimeError
from vime.metrics import read_jsonl

LIMIT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Trained:
    """One finished run: ``lines`` are (seconds since the command began, text); ``rows`` those of metrics.jsonl."""

    lines: list[tuple[float, str]]
    rows: list[dict[str, Any]]
    seconds: float

    def first(self, text: str) -> float:
        """When the first line with ``text`` came. VimeError if none did: the talk of ``vime train`` has changed."""
        for at, line in self.lines:
            if text in line:
                return at
        raise VimeError(f"vime train printed no line with {text!r}")


def train(case: Case, overrides: Sequence[str], before: Sequence[str] = ()) -> Trained:
    """Run the example ``case`` with ``overrides``, without evaluation. VimeError if it fails or does not end.

    ``before``: words of the command line ahead of "train".
    """
    with tempfile.TemporaryDirectory(prefix="vime-benchmark-") as folder:
        run_dir = Path(folder) / "run"
        settings = [f"run.dir={run_dir}", "eval.prompts=[]", "eval.interval=0", *overrides]
        command = [sys.executable, "-m", "vime_cli", *before, "train", str(case.folder / "run.toml"), *settings]
        start = time.perf_counter()
        process = subprocess.Popen(
            ["timeout", "--signal=TERM", "--kill-after=30", str(LIMIT_SECONDS), *command],
            env=os.environ | {"VIME_LOG_LEVEL": "INFO", "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        lines = [(time.perf_counter() - start, line.rstrip()) for line in process.stderr]
        if process.wait(LIMIT_SECONDS) != 0:
            raise VimeError(f"{' '.join(command)}: exit code {process.returncode}:\n" + "\n".join(t for _, t in lines))
        return Trained(lines, read_jsonl(run_dir / "metrics.jsonl"), time.perf_counter() - start)
