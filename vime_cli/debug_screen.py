"""Where the debugger of ``vime debug-attach connect --terminal`` reads and writes: a terminal, or pipes."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Mapping

from vime_cli import output


class ConsoleScreen:
    """Standard input and output. Without a terminal what is read is written too: the transcript can be followed."""

    def __init__(self) -> None:
        self.is_interactive = sys.stdin.isatty()
        self._buffer = b""
        self._is_at_end = False
        if self.is_interactive:
            import readline

            readline.set_auto_history(True)  # in memory alone

    def read(self, prompt: str) -> str | None:
        if self.is_interactive:
            try:
                return input(prompt)
            except EOFError:
                output.text("\n")
                return None
            except KeyboardInterrupt:
                output.text("\n")
                return ""
        line = self._piped_line()
        if line is not None:
            output.text(f"{prompt}{line}\n")
        return line

    def ready(self) -> bool:
        if self.is_interactive:
            return False
        if b"\n" in self._buffer or self._is_at_end:
            return True
        return bool(select.select([sys.stdin], [], [], 0)[0])

    def say(self, text: str) -> None:
        output.text(f"{text}\n")

    def source(self, lines: Mapping[int, str], current: int) -> None:
        output.source(lines, current)

    def _piped_line(self) -> str | None:
        while b"\n" not in self._buffer and not self._is_at_end:
            data = os.read(sys.stdin.fileno(), 4096)
            self._buffer += data
            self._is_at_end = not data
        line, newline, self._buffer = self._buffer.partition(b"\n")
        return None if not line and not newline else line.decode(errors="replace")
