"""Talk goes to stderr: log lines with the process's role and rank, and the progress of a run; stacks, on request."""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from vime.errors import UsageError

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

LEVEL_VARIABLE = "VIME_LOG_LEVEL"
BEAT_SECONDS = 30.0
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
STACKS_SIGNAL = 41
"""A real-time signal: nothing else uses it, whereas Ray's libraries, job schedulers and users share SIGUSR1 and 2."""
STACKS_FILE = "vime-stacks"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module: ``get_logger(__name__)``."""
    return logging.getLogger(name)


def setup_logging(role: str = "driver", rank: int | None = None, stream: TextIO | None = None) -> None:
    """Send the logs of ``vime`` to stderr as ``trainer 1 WARNING text``; the level is VIME_LOG_LEVEL, or WARNING.

    Call once per process; a second call replaces the first. Raises UsageError for an unknown level.
    """
    level = os.environ.get(LEVEL_VARIABLE, "WARNING").upper()
    if level not in _LEVELS:
        raise UsageError(f"{LEVEL_VARIABLE} = {level}: must be one of {', '.join(_LEVELS)}")
    who = role if rank is None else f"{role} {rank}"
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {who} %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("vime")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level)


@cache
def answer_stack_requests() -> None:
    """Write the Python stacks of all threads into a file in memory, and go on, whenever STACKS_SIGNAL arrives.

    Nothing runs until then. Who asks reads the file as ``/proc/PID/fd/N``; it ends with the process, whatever ends it,
    and its forks inherit both. Does nothing where there is no such file (Linux has it), or the signal is taken.
    """
    if not hasattr(os, "memfd_create") or signal.getsignal(STACKS_SIGNAL) != signal.SIG_DFL:
        return
    file = os.memfd_create(STACKS_FILE)
    import fcntl

    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    faulthandler.register(STACKS_SIGNAL, file, all_threads=True, chain=False)


@dataclass
class Phase:
    """One phase of a rollout, as it goes."""

    name: str
    total: int | None = None
    done: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def update(self, done: int | None = None, tokens: int | None = None) -> None:
        """Set how many samples are done and how many tokens were produced so far."""
        self.done = self.done if done is None else done
        self.tokens = self.tokens if tokens is None else tokens

    def __str__(self) -> str:
        text = f"{self.name} {self.seconds:.0f}s"
        if self.total:
            text += f" {self.done}/{self.total}"
        if self.tokens and self.seconds > 0:
            text += f" {self.tokens / self.seconds:.0f} tokens/s"
        return text


class Progress:
    """What a run says while it goes: a live line on a terminal, else one plain line per rollout, and one every
    ``beat_seconds`` of a phase that takes that long.
    """

    def __init__(
        self,
        num_rollouts: int | None = None,
        stream: TextIO | None = None,
        is_terminal: bool | None = None,
        beat_seconds: float = BEAT_SECONDS,
    ) -> None:
        self.num_rollouts = num_rollouts
        self.stream = stream or sys.stderr
        self.is_terminal = self.stream.isatty() if is_terminal is None else is_terminal
        self.beat_seconds = beat_seconds
        self._phases: list[Phase] = []
        self._live: Live | None = None

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        """Show a phase while the block runs; ``update`` it with samples done (of ``total``) and tokens."""
        phase = Phase(name, total)
        self._phases.append(phase)
        self._start_live()
        try:
            with self._beating(phase):
                yield phase
        finally:
            self._phases.remove(phase)
            if not self._phases:
                self._stop_live()

    @contextmanager
    def _beating(self, phase: Phase) -> Iterator[None]:
        """Off a terminal, a phase that takes long says how far it is, lest its silence be taken for a hang."""
        if self.is_terminal or self._phases[0] is not phase:
            yield
            return
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(self.beat_seconds):
                self.note(f"... {phase}")

        thread = threading.Thread(target=beat, name="vime-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def line(self, row: Mapping[str, Any]) -> None:
        """One line for a finished rollout, from its metrics."""
        self.note(describe(row, self.num_rollouts))

    def note(self, text: str) -> None:
        self._write(text)

    def warn(self, text: str) -> None:
        self._write(f"warning: {text}")

    def close(self) -> None:
        self._stop_live()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __rich__(self) -> Text:
        from rich.text import Text

        return Text("  ".join(str(phase) for phase in self._phases), no_wrap=True, overflow="ellipsis")

    def _write(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self.stream, flush=True)

    def _start_live(self) -> None:
        if not self.is_terminal or self._live is not None:
            return
        from rich.console import Console
        from rich.live import Live

        self._live = Live(self, console=Console(file=self.stream), refresh_per_second=4, transient=True)
        self._live.start()

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


_COLUMNS = {
    "reward": ("rollout/raw_reward", "{:.3f}"),
    "truncated": ("rollout/truncated_ratio", "{:.0%}"),
    "loss": ("train/loss", "{:.3g}"),
    "kl": ("rollout/kl", "{:.2g}"),
    "grad_norm": ("train/grad_norm", "{:.3g}"),
    "|train-rollout|": ("train/train_rollout_logprob_abs_diff", "{:.2g}"),
    "tokens/s": ("perf/generate_tokens_per_second", "{:.0f}"),
}


def describe(row: Mapping[str, Any], num_rollouts: int | None = None) -> str:
    """A row of metrics on one line; metrics that are absent are left out."""
    of = "" if num_rollouts is None else f"/{num_rollouts}"
    parts = [f"rollout {row['rollout_id']}{of}"]
    parts += [f"{label} {_show(form, row[name])}" for label, (name, form) in _COLUMNS.items() if name in row]
    times = {name: value for name, value in row.items() if name.startswith("perf/") and name.endswith("_time")}
    if "perf/step_time" in times:
        step = times.pop("perf/step_time")
        inner = " ".join(f"{n[5:-5]} {v:.1f}" for n, v in times.items() if v >= 0.05)
        parts.append(f"{step:.1f}s ({inner})" if inner else f"{step:.1f}s")
    return "  ".join(parts)


def _show(form: str, value: float) -> str:
    return form.format(value) if math.isfinite(value) else str(value)
