"""What a worker wrote on stderr before it died: Ray reports the death, and keeps the reason in a file of its own."""

from __future__ import annotations

import re
from pathlib import Path

from vime.debug.places import place_of
from vime.debug.stacks import MAIN, Frame, Thread

TAIL_BYTES = 65_536
FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
STACK = re.compile(
    r"^(?:Current thread .*|Thread .*|Stack) \(most recent call first\):\n((?:  File .*\n)+)", re.MULTILINE
)
FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')
UNCAUGHT = re.compile(r"^(terminate called .+(?:\n +what\(\): .+)?)$", re.MULTILINE)


def last_words(death: str) -> str:
    """For Ray's report of a death: "Segmentation fault in score (reward.py:12)"; "" where nothing is known."""
    found = re.search(r"pid: (\d+)", death)
    folder = _logs()
    if found is None or folder is None:
        return ""
    files = sorted(folder.glob(f"worker-*-{found[1]}.err"))
    return read_fatal(_tail(files[-1])) if files else ""


def read_fatal(text: str) -> str:
    """The last fatal error in what a process wrote, and where it was; "" for none."""
    fatal = list(FATAL.finditer(text))
    if not fatal:
        uncaught = UNCAUGHT.findall(text)
        return " ".join(uncaught[-1].split()) if uncaught else ""
    stack = STACK.search(text, fatal[-1].end())
    if stack is None:
        return fatal[-1][1]
    frames = tuple(Frame(name, file, int(line)) for file, line, name in FRAME.findall(stack[1]))
    return f"{fatal[-1][1]} at {place_of(Thread(MAIN, frames))}"


def _tail(path: Path) -> str:
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace")


def _logs() -> Path | None:
    """Where Ray keeps the output of workers of this machine; None where this process is no part of its cluster."""
    from ray._private import worker

    node = worker._global_node
    return None if node is None else Path(node.get_logs_dir_path())
