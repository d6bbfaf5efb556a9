"""Run the real `vime` command in a process group of its own, and find whatever it left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

VIME = [sys.executable, "-m", "vime_cli"]
LIMIT_SECONDS = 240
MARK = "VIME_TEST_ID"


@dataclass
class Command:
    """A started command. Every process below it carries a mark in its environment, whoever its parent is by now."""

    arguments: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)
    program: Sequence[str] = tuple(VIME)

    def __post_init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.seen: set[int] = set()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment, MARK: self.id}
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [*self.program, *map(str, self.arguments)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """Remember every process below: some overwrite their environment, and with it the mark, with their title."""
        while self.process.poll() is None:
            self.seen |= family(marked(self.id))
            time.sleep(0.5)

    def wait_for_line(self, pattern: str) -> str:
        """Read on until a line matches. Fails, with what was printed, if the command ends first."""
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if re.search(pattern, line):
                return line
        raise AssertionError(f"ended with {self.process.wait(10)} before {pattern!r}:\n{self.text}")

    def finish(self, timeout_seconds: float = LIMIT_SECONDS) -> int:
        """Exit code, once everything is printed. The whole group is killed at the limit."""
        try:
            out, _ = self.process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            out, _ = self.process.communicate(timeout=10)
            self.lines += out.splitlines()
            raise AssertionError(f"not ended within {timeout_seconds} s:\n{self.text}") from None
        self.lines += out.splitlines()
        return self.process.returncode

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def pids(self, name: str = "") -> list[int]:
        """Living processes of this command whose title or command line contains ``name``."""
        self.seen |= family(marked(self.id))
        return [pid for pid in self.seen if is_alive(pid) and name in title(pid)]

    def one(self, name: str) -> int:
        """The pid of the only process called ``name``."""
        (pid,) = self.pids(name)
        return pid

    def child_of(self, name: str) -> int:
        """The pid of the only child of the process called ``name`` (Ray's title sticks to what it forks)."""
        actors = self.pids(name)
        (pid,) = [pid for pid in actors if int(stat(pid)[1]) in actors]
        return pid

    def left_behind(self, patience_seconds: float = 10) -> list[str]:
        """Processes still there after the end; killed, so that no test disturbs the next."""
        deadline = time.monotonic() + patience_seconds
        while (pids := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.1)
        names = [f"{pid} {title(pid)}" for pid in pids]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return names


def vime(*arguments: object, **environment: str) -> Command:
    """Run to the end. Fails if the command leaves a process behind."""
    command = Command([str(a) for a in arguments], environment)
    command.finish()
    assert command.left_behind() == []
    return command


def marked(mark: str) -> set[int]:
    """Living processes with the mark in their environment."""
    found = set()
    for pid in processes():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in environment and is_alive(pid):
            found.add(pid)
    return found


def family(pids: set[int]) -> set[int]:
    """``pids`` and everything below them."""
    children: dict[int, list[int]] = {}
    for pid in processes():
        children.setdefault(int(stat(pid)[1]), []).append(pid)
    found, new = set(), set(pids)
    while new:
        found |= new
        new = {child for pid in new for child in children.get(pid, [])} - found
    return found


def processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]


def stat(pid: int) -> list[str]:
    """state, parent, ... of a process; a dead one has state X and parent 0."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


def is_alive(pid: int) -> bool:
    return stat(pid)[0] not in "XZ"


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
