"""A debug run of small scripts in a temporary folder: real processes, debugpy and a client of its protocol."""

import hashlib
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import vime.debug.stop
from vime.debug.attach.dap import Dap, StackFrame
from vime.debug.stop.records import WAITING, Stop, stops
from vime.debug.stop.registry import FolderRegistry
from vime.debug.stop.spec import Point, Spec

SITE = Path(vime.debug.stop.__file__).with_name("site")
SECONDS = 90.0


@dataclass
class Started:
    """The main process of a debug run, and what it says."""

    process: subprocess.Popen
    registry: FolderRegistry
    log: Path

    def stops(self, number: int = 1, state: str = WAITING) -> list[Stop]:
        """Wait for that many stops at once."""
        found: list[Stop] = []

        def is_there() -> bool:
            found[:] = [stop for stop in stops(self.registry) if stop.state == state]
            return len(found) >= number

        self.until(is_there, f"{number} stop(s) that are {state}")
        return found

    def until(self, is_there: Any, what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not is_there():
            assert time.monotonic() < deadline, f"no {what}\n{self.log.read_text()}"
            if self.process.poll() is not None and not is_there():
                raise AssertionError(f"ended with {self.process.returncode} before {what}\n{self.log.read_text()}")
            time.sleep(0.05)

    def said(self, text: str) -> None:
        """Wait until it has said that."""
        self.until(lambda: text in self.log.read_text(), repr(text))

    def end(self) -> tuple[int, str]:
        """(exit code, what it said)."""
        code = self.process.wait(SECONDS)
        return code, self.log.read_text()


@dataclass
class DebugRun:
    """Files of a program, and its points."""

    folder: Path
    registry: FolderRegistry
    spec: Spec
    environment: dict[str, str] = field(default_factory=dict)
    started: list[Started] = field(default_factory=list)

    def write(self, name: str, source: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(textwrap.dedent(source).lstrip("\n"))
        return path

    def point(self, where: str, text: str = "", **more: Any) -> Point:
        """FILE:LINE, or FILE with ``text`` of the line, or MODULE:QUALNAME."""
        name = f"p{len(self.spec.points)}"
        if text:
            lines = (self.folder / where).read_text().splitlines()
            where = f"{where}:{next(i for i, line in enumerate(lines, 1) if text in line)}"
        before, _, after = where.rpartition(":")
        if after.isdigit():
            path = self.folder / before
            sha1 = hashlib.sha1(path.read_bytes()).hexdigest()
            point = Point(name, where, str(path), int(after), sha1, **more)
        else:
            point = Point(name, where, module=before, qualname=after, **more)
        self.set(points=(*self.spec.points, point))
        return point

    def set(self, **changes: Any) -> None:
        self.spec = replace(self.spec, **changes)

    def environ(self) -> dict[str, str]:
        path = os.pathsep.join([str(SITE), self.environment.get("PYTHONPATH", "")]).strip(os.pathsep)
        return {**os.environ, **self.environment, "VIME_DEBUG_SPEC": self.spec.dumps(), "PYTHONPATH": path}

    def start(self, *command: str, runner: bool = True) -> Started:
        log = self.folder / f"log{len(self.started)}.txt"
        words = [sys.executable, *(("-m", "vime.debug.stop.runner") if runner else ()), *command]
        with log.open("w") as out:
            process = subprocess.Popen(
                words, cwd=self.folder, env=self.environ(), stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )
        self.started.append(Started(process, self.registry, log))
        return self.started[-1]


@pytest.fixture
def debug_run(tmp_path: Path) -> Iterator[DebugRun]:
    folder, private = tmp_path / "code", tmp_path / "registry"
    folder.mkdir()
    registry = FolderRegistry(private)
    run = DebugRun(folder, registry, Spec("d-1", folder=str(private), working_dir=str(folder), wait_seconds=120.0))
    yield run
    for started in run.started:
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait(10)


@dataclass
class Attached:
    """A client at its first stop."""

    dap: Dap
    thread: int
    reason: str
    stack: list[StackFrame]

    @property
    def at(self) -> tuple[str, str, int]:
        top = self.stack[0]
        return top.name, Path(top.file).name, top.line

    def locals(self) -> dict[str, str]:
        names = {v.name: v.value for v in self.dap.locals(self.stack[0])}
        names.pop("special variables", None)
        return names

    def next(self) -> "Attached":
        self.dap.go("next", self.thread)
        thread, reason = self.dap.stopped()
        return Attached(self.dap, thread, reason, self.dap.stack(thread))

    def leave(self) -> None:
        """Continue, and detach."""
        self.dap.go("continue", self.thread)
        self.dap.detach()


def attach(stop: Stop, **options: Any) -> Attached:
    dap = Dap(stop.host, stop.port, 60.0)
    dap.attach(**options)
    thread, reason = dap.stopped()
    return Attached(dap, thread, reason, dap.stack(thread))


@pytest.fixture
def attached() -> Any:
    return attach
