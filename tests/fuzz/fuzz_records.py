"""Read thousands of mutated records in this process. ``python tests/fuzz/fuzz_records.py [--inputs N] [--seed S]``

Exit code 1 if any of them ran code, touched the file system, took longer or more memory than allowed, was shown as
anything but a UsageError, or was accepted and then could not be used.
"""

from __future__ import annotations

import argparse
import encodings.cp437  # noqa: F401 - zipfile decodes names with it, and imports are looked at below
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from mutations import Mutator, originals

from vime.errors import UsageError
from vime.record import read
from vime.record.packing import pack, unpack
from vime.types import RolloutBatch

MEMORY = 512 << 20
"""Bytes that reading may take above what the process has."""

FORBIDDEN = (
    "exec",
    "compile",
    "import",
    "os.",
    "subprocess",
    "socket",
    "ctypes",
    "shutil",
    "pickle.find_class",
    "code.",
)
"""Audit events that reading a file never raises; "open" is looked at apart."""


class TookTooLong(BaseException):
    """Raised by the alarm; no Exception, so that nothing can swallow it."""


@dataclass
class Watch:
    """What Python's audit hook saw while a file was read."""

    path: str = ""
    events: list[str] = field(default_factory=list)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.path:
            return
        is_elsewhere = event == "open" and (str(arguments[0]) != self.path or "w" in str(arguments[1]))
        if is_elsewhere or event.startswith(FORBIDDEN):
            self.events.append(f"{event} {arguments!r}"[:120])


@dataclass
class Summary:
    """Counts of outcomes; ``failures`` are (what was done to the file, what went wrong, the file)."""

    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    mutations: Counter[str] = field(default_factory=Counter)
    slowest: list[tuple[float, str]] = field(default_factory=list)
    failures: list[tuple[str, str, bytes]] = field(default_factory=list)

    def lines(self, seconds: float) -> list[str]:
        total = sum(self.mutations.values())
        kinds = [f"  {count:6} {kind}" for kind, count in self.refused.most_common()]
        slow = [f"  {1000 * s:6.0f} ms, {kind}" for s, kind in sorted(self.slowest, reverse=True)[:3]]
        done = ", ".join(f"{kind} {n}" for kind, n in sorted(self.mutations.items()))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return [
            f"{total} inputs in {seconds:.0f} s: {self.accepted} accepted, {sum(self.refused.values())} refused, "
            f"{len(self.failures)} FAILED",
            f"mutations: {done}",
            "refused, by message:", *kinds,
            f"slowest (peak memory of the process {peak:.0f} MB):", *slow,
        ]  # fmt: skip


def use(batch: RolloutBatch) -> None:
    """What is accepted can be trained on and written again."""
    list(batch.samples())
    again = unpack(batch.rollout_id, batch.header, pack(batch))
    assert isinstance(again, RolloutBatch), again
    assert again.token_ids_T.tobytes() == batch.token_ids_T.tobytes()


def kind_of(message: str, path: Path) -> str:
    """A message without what differs from file to file."""
    text = message.splitlines()[0].replace(str(path), "FILE")
    text = re.sub(r"Python object .*;", "Python object NAME;", text)
    text = re.sub(r"(cannot be read \(\w+).*", r"\1)", text)
    return re.sub(r"'[^']*'|\d+", "#", text)[:110]


def examine(name: str, data: bytes, path: Path, reader: Callable[[Path], Any], watch: Watch, limit: float) -> str:
    """Read one input: "" if it was accepted, else the message. Raises AssertionError if something went wrong."""
    path.write_bytes(data)
    watch.events.clear()
    signal.setitimer(signal.ITIMER_REAL, limit)
    watch.path = str(path)
    try:
        batch = reader(path)
        watch.path = ""
        use(batch)
        message = ""
    except UsageError as error:
        message = error.message
    except TookTooLong:
        raise AssertionError(f"took more than {limit:g} s") from None
    except Exception as error:
        raise AssertionError(f"raised {type(error).__name__}: {error}"[:300]) from error
    finally:
        watch.path = ""
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert not watch.events, f"did {watch.events[0]}"
    assert "MemoryError" not in message, "took too much memory"
    is_list = " is a dump of " in message
    assert is_list or "\n" not in message, f"a message of several lines: {message!r}"
    assert message == "" or message.startswith(str(path)), f"a message that does not name the file: {message!r}"
    assert message.replace("\n", "").isprintable(), f"a message with control characters: {message!r}"
    assert len(message) < 10_000, "a message without end"
    return message


PLANTED: dict[str, Callable[[Path], Any]] = {
    "code": lambda path: torch.load(path, weights_only=False) and read(path),
    "hang": lambda path: time.sleep(60),
    "raise": lambda path: {}["key"],
    "memory": lambda path: (bytearray(4 * MEMORY), read(path))[1],
    "accept": lambda path: None,
}
"""Readers with a fault, each of which the fuzzer must find."""


def run(inputs: int, seed: int, seconds: float, limit: float, plant: str | None) -> int:
    reader = PLANTED[plant] if plant else read
    summary, watch, start = Summary(), Watch(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vime-fuzz-") as name:
        folder = Path(name)
        files, canary = originals(folder), folder / "canary"
        mutator = Mutator(seed, files, canary)
        path = folder / "x.pt"
        for data in files:  # good files are accepted, and all that reading imports is there
            path.write_bytes(data)
            use(read(path))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
        signal.signal(signal.SIGALRM, _alarm)
        sys.addaudithook(watch.hook)
        while sum(summary.mutations.values()) < inputs and time.monotonic() - start < seconds:
            kind, data = mutator.mutate()
            summary.mutations[kind] += 1
            began = time.monotonic()
            try:
                message = examine(kind, data, path, reader, watch, limit)
                assert not canary.exists(), "made the canary"
                summary.accepted += not message
                summary.refused.update([kind_of(message, path)] if message else [])
            except AssertionError as problem:
                summary.failures.append((kind, str(problem), data))
                if canary.exists():
                    canary.rmdir() if canary.is_dir() else canary.unlink()
            summary.slowest = sorted([*summary.slowest, (time.monotonic() - began, kind)], reverse=True)[:3]
    print("\n".join(summary.lines(time.monotonic() - start)))
    return _report(summary, seed)


def _report(summary: Summary, seed: int) -> int:
    for i, (kind, problem, data) in enumerate(summary.failures[:5]):
        kept = Path(tempfile.gettempdir()) / f"vime-fuzz-{seed}-{i}.pt"
        kept.write_bytes(data)
        print(f"FAILED: {kind}: {problem} (kept as {kept})")
    return 1 if summary.failures else 0


def _alarm(*_: Any) -> None:
    raise TookTooLong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1200.0, help="stop after this time, whatever is left")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds for one input")
    parser.add_argument("--plant", choices=sorted(PLANTED), help="a reader with a fault, to see it found")
    asked = parser.parse_args()
    return run(asked.inputs, asked.seed, asked.seconds, asked.limit, asked.plant)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
