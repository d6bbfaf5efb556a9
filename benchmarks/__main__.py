"""``python -m benchmarks [rollout|trainer|overhead|sync|start|record|dump|debug ...] [--repetitions N] [--json]``"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys

from benchmarks.measure import Result
from benchmarks.process import ONE_THREAD
from benchmarks.report import as_plain, from_plain, show
from vime.errors import EXIT_RUN_FAILED, VimeError

NAMES = ("rollout", "trainer", "overhead", "sync", "start", "record", "dump", "debug")
LIMIT_SECONDS = 1800.0


def main() -> int:
    """0 when everything was measured, whether or not the goals are met; they depend on the machine's peace."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(NAMES)}; all of them by default")
    parser.add_argument("--repetitions", type=int, default=3, help="interleaved repetitions that count (default 3)")
    parser.add_argument("--json", action="store_true", help="the same as JSON on stdout")
    asked = parser.parse_args()
    unknown = [name for name in asked.names if name not in NAMES]
    if unknown or asked.repetitions < 1:
        parser.error(f"unknown benchmark {unknown[0]}" if unknown else "--repetitions must be at least 1")
    os.environ.update(ONE_THREAD)
    names = asked.names or list(NAMES)
    try:
        results = [_one(name, asked.repetitions, is_alone=len(names) == 1) for name in names]
    except VimeError as error:
        print(f"error: {error.message}", f"hint: {error.hint}" if error.hint else "", sep="\n", file=sys.stderr)
        return error.exit_code
    if asked.json:
        print(json.dumps([as_plain(result) for result in results], indent=2))
    else:
        show(results)
    return 0


def _one(name: str, repetitions: int, is_alone: bool) -> Result:
    if is_alone:
        return importlib.import_module(f"benchmarks.{name}").run(repetitions)
    print(f"{name} ...", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "benchmarks", name, "--json", f"--repetitions={repetitions}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=LIMIT_SECONDS, text=True, check=False)
    if done.returncode != 0:
        raise VimeError(f"benchmark {name} ended with exit code {done.returncode or EXIT_RUN_FAILED}")
    (data,) = json.loads(done.stdout)
    return from_plain(data)


if __name__ == "__main__":
    sys.exit(main())
