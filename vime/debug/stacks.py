"""The Python stacks of processes: by py-spy where it is there and may, else by asking the process itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vime.debug.processes import Member
from vime.log import STACKS_FILE, STACKS_SIGNAL

LIMIT_SECONDS = 10.0
NATIVE_LIMIT_SECONDS = 30.0
ANSWER_SECONDS = 3.0
NUM_AT_ONCE = 4
MAIN = "MainThread"
OURS = ("vime-stacks", "vime-watchdog")


@dataclass(frozen=True, slots=True)
class Frame:
    """One call. ``file``: the full path, or the name of a library for a C frame (line 0)."""

    function: str
    file: str
    line: int

    @property
    def name(self) -> str:
        """The function without the class that py-spy sets before it."""
        return self.function.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})" if self.line else f"{self.function} ({self.file})"


@dataclass(frozen=True, slots=True)
class Thread:
    """``frames``: the innermost first. ``is_active``: it runs, as far as py-spy can tell."""

    name: str
    frames: tuple[Frame, ...]
    is_active: bool = False


@dataclass(frozen=True, slots=True)
class Dump:
    """Where one process stands, the main thread first; or why that is not known."""

    who: Member
    threads: tuple[Thread, ...] = ()
    source: str = ""
    problem: str = ""
    command: str = ""


def dump_all(members: Iterable[Member], native: bool = False) -> list[Dump]:
    """The stacks of processes of this machine, in order. Bounded in time; a process that does not answer says so."""
    with ThreadPoolExecutor(NUM_AT_ONCE, thread_name_prefix="vime-stacks") as pool:
        return list(pool.map(lambda member: dump(member, native), members))


def dump(member: Member, native: bool = False) -> Dump:
    """The stacks of one process of this machine."""
    if not member.is_alive:
        return Dump(member, problem="has ended")
    if member.is_stopped:
        return Dump(member, problem="is stopped, by SIGSTOP or by a debugger")
    if member.pid == os.getpid():
        return _first_main(Dump(member, tuple(own_threads()), "itself"))
    found = by_py_spy(member, native)
    if found.problem:
        asked = by_signal(member)
        found = asked if not asked.problem else replace(found, problem=f"{found.problem}; {asked.problem}")
    return _first_main(found) if found.threads else replace(found, command=_title(member.pid))


def own_threads() -> list[Thread]:
    """The threads of this process, but for those that ask."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        frames: list[Frame] = []
        at: Any = frame
        while at is not None:
            frames.append(Frame(at.f_code.co_name, at.f_code.co_filename, at.f_lineno or 0))
            at = at.f_back
        name = names.get(ident, str(ident))
        if not name.startswith(OURS):
            found.append(Thread(name, tuple(frames)))
    return found


def frames_of(error: BaseException) -> tuple[Frame, ...]:
    """Where an error was raised, the innermost first."""
    found = traceback.extract_tb(error.__traceback__)
    return tuple(Frame(at.name, at.filename, at.lineno or 0) for at in reversed(found))


def py_spy_path() -> str | None:
    """The program of the py-spy package; None where it is not installed."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def by_py_spy(member: Member, native: bool = False) -> Dump:
    """Read from outside; the process stands still meanwhile, for milliseconds (with ``native`` for a second)."""
    program = py_spy_path()
    if program is None:
        return Dump(member, problem="py-spy is not installed")
    limit = NATIVE_LIMIT_SECONDS if native else LIMIT_SECONDS
    command = [program, "dump", "--json", "--full-filenames", "--pid", str(member.pid), *(["--native"] * native)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return Dump(member, problem=f"py-spy had no answer within {limit:g} s")
    except OSError as error:
        return Dump(member, problem=f"{program} cannot be run: {error.strerror}")
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return Dump(member, problem=f"py-spy: {lines[0] if lines else f'exit code {done.returncode}'}")
    threads = [
        Thread(
            MAIN if t["os_thread_id"] == member.pid else t["thread_name"] or f"thread {t['thread_id']}",
            tuple(Frame(f["name"], f["filename"], f["line"]) for f in t["frames"]),
            bool(t["active"]),
        )
        for t in json.loads(done.stdout)
    ]
    return Dump(member, tuple(threads), "py-spy" if threads else "", "" if threads else "py-spy found no thread")


_asking = threading.Lock()
"""A process and its forks answer into one file: one after the other."""


def by_signal(member: Member) -> Dump:
    """Ask the process to write its stacks, see ``vime.log.answer_stack_requests``; the signal would end any other."""
    file = _answer_file(member.pid)
    if file is None or not _catches(member.pid, STACKS_SIGNAL):
        return Dump(member, problem="it is not prepared to write its stacks itself")
    with _asking, suppress(OSError):
        before = os.stat(file).st_size
        os.kill(member.pid, STACKS_SIGNAL)
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.02)
            text = _read_from(file, before)
            if text and text == _read_after(file, before, 0.05):
                return Dump(member, tuple(parse_faulthandler(text)), "faulthandler")
    return Dump(member, problem=f"it did not write its stacks within {ANSWER_SECONDS:g} s")


def parse_faulthandler(text: str) -> list[Thread]:
    """The threads of a faulthandler dump. The interpreter lists the newest first, so that the main thread is last."""
    threads: list[Thread] = []
    frames: list[Frame] = []
    for line in [*text.splitlines(), "Thread (end)"]:
        if found := re.match(r'\s+File "(.*)", line (\d+) in (.*)', line):
            frames.append(Frame(found[3], found[1], int(found[2])))
        elif re.match(r"(Current thread|Thread) ", line):
            if frames:
                threads.append(Thread(f"thread {len(threads) + 1}", tuple(frames)))
            frames = []
    return [*threads[:-1], replace(threads[-1], name=MAIN)] if threads else []


def _first_main(found: Dump) -> Dump:
    return replace(found, threads=tuple(sorted(found.threads, key=lambda thread: thread.name != MAIN)))


def _answer_file(pid: int) -> str | None:
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(entry.path).startswith(f"/memfd:{STACKS_FILE}"):
                    return entry.path
    return None


def _catches(pid: int, number: int) -> bool:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _read_from(file: str, start: int) -> str:
    with open(file, "rb") as answer:
        answer.seek(start)
        return answer.read().decode(errors="replace")


def _read_after(file: str, start: int, seconds: float) -> str:
    time.sleep(seconds)
    return _read_from(file, start)


def _title(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def as_dict(found: Dump) -> dict[str, Any]:
    """Plain data for ``--json``, and for the trip from another node."""
    who = found.who
    return {
        "name": who.name,
        **{key: getattr(who, key) for key in ("role", "rank", "pid", "host", "started", "boot", "node", "label")},
        "source": found.source,
        "problem": found.problem,
        "command": found.command,
        "threads": [
            {"name": t.name, "is_active": t.is_active, "frames": [[f.function, f.file, f.line] for f in t.frames]}
            for t in found.threads
        ],
    }


def from_dict(row: dict[str, Any]) -> Dump:
    """The inverse of ``as_dict``."""
    who = Member(**{key: row[key] for key in ("role", "rank", "pid", "host", "started", "boot", "node", "label")})
    threads = [Thread(t["name"], tuple(Frame(*f) for f in t["frames"]), t["is_active"]) for t in row["threads"]]
    return Dump(who, tuple(threads), row["source"], row["problem"], row["command"])


def in_full(dumps: Sequence[Dump]) -> str:
    """Every frame of every thread, process by process."""
    lines: list[str] = []
    for found in dumps:
        who = found.who
        by = f", by {found.source}" if found.source else ""
        lines += [f"==== {who.name} (pid {who.pid} on {who.host}{by})"]
        if found.problem:
            lines += [f"  {found.problem}" + (f" ({found.command})" if found.command else "")]
        for thread in found.threads:
            lines += [f"  -- {thread.name}{' (active)' if thread.is_active else ''}"]
            lines += [f"     {frame}" for frame in thread.frames]
    return "\n".join(lines) + "\n"
