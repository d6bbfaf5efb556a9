"""Where the debugger in the terminal reads and writes, and what it can be told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

HELP = """\
w, where             the stack, the innermost frame first
l, list [N]          the source around the line where it stands, N lines either way
u, up / d, down      to the caller's frame / back
p, print EXPR        the value of an expression
locals               names and values of this frame
exec STATEMENT       run a statement in this frame, such as exec x = 3; short: !x = 3
s, step              to the next line, into calls
n, next              to the next line of this function
r, return            to where this function has returned
c, continue          run on, to the next breakpoint or exception
b, break [FILE:]LINE [if EXPR]   a breakpoint; without arguments: list them
clear [FILE:LINE]    remove it; without arguments: all that were set here
threads              the threads of Python
detach               leave; the process runs on
q, quit              the same, after a question
h, help              this; Ctrl-C pauses a process that runs"""


class Screen(Protocol):
    """Where the terminal reads and writes."""

    is_interactive: bool

    def read(self, prompt: str) -> str | None:
        """The next line; None at the end of the input."""

    def ready(self) -> bool:
        """Whether a line can be read without waiting; never for a person, who has Ctrl-C."""

    def say(self, text: str) -> None: ...

    def source(self, lines: Mapping[int, str], current: int) -> None:
        """Lines of a program, one of them where it stands."""
