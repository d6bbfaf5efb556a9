"""Lines for a shell: the crash again, and the run without it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vime.debug.crash.toggles import Toggle


@dataclass(frozen=True)
class Commands:
    """``reproduce`` is empty where there is nothing to reproduce. ``without_crash``: one for each way out."""

    reproduce: str = ""
    without_crash: tuple[str, ...] = ()


def way_out(toggles: Sequence[Toggle], given: Mapping[str, Any], command: str) -> str:
    """A line for a shell that runs ``command`` with this change. ``given``: the run's own [vllm]."""
    before = [f"{name}={shlex.quote(value)}" for t in toggles for name, value in t.environment.items()]
    pairs = [f"{path}={_value(value)}" for t in toggles for path, value in _flat("vllm", t.arguments)]
    line = " ".join([*before, command, *map(shlex.quote, pairs)])
    dropped = [f"vllm.{name}" for t in toggles for name in t.drops if name in given]
    return f"{line}  # and without {', '.join(dropped)}" if dropped else line


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _flat(f"{name}.{key}", entry)
    else:
        yield name, value


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
