"""Stands in for ``vime.runs.crash_attempt`` in tests of its processes: ends as its order says, without an engine."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import subprocess
import sys
import time
from pathlib import Path


def note(order: dict, **facts: object) -> None:
    (Path(order["folder"]) / "result.json").write_text(json.dumps(facts))


def main() -> None:
    order = json.loads(Path(sys.argv[2]).read_text())
    faulthandler.enable()
    kind = order["kind"]
    note(order, phase="serving", facts={"env MARK": os.environ.get("MARK")})
    if kind == "survived":
        note(order, phase="done", outcome="survived")
    elif kind == "late":
        note(order, phase="done", outcome="survived")
        ctypes.string_at(0)
    elif kind == "segfault":
        ctypes.string_at(0)
    elif kind == "out of memory":
        note(order, phase="serving", outcome="crashed", cause="engine 0 is dead", exit_codes=[None, -9])
    elif kind == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time\nwhile True: time.sleep(1)"])
        Path(order["folder"], "child.pid").write_text(str(child.pid))
        while True:
            time.sleep(1)
    elif kind == "exception":
        note(order, phase="serving", outcome="crashed", cause="engine 0 is dead", exit_codes=[1])
        print(
            'Traceback (most recent call last):\n  File "a.py", line 3, in step\n    f()\nx.CudaError: boom',
            file=sys.stderr,
        )
    elif kind == "core":
        note(order, phase="serving", outcome="crashed", cause="engine 0 is dead", exit_codes=[-11])
    elif kind == "nothing":
        raise SystemExit(7)


if __name__ == "__main__":
    main()
