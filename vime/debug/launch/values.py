"""Values of the options of ``vime debug-attach run``: durations, ranks, roles, ports. ValueError says what is wrong."""

from __future__ import annotations

import re

from vime.debug.stop.identity import CHOICES, ROLES

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+", re.ASCII)
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])", re.ASCII)
_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_PORTS = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
LONGEST_SECONDS = 365 * 86400.0
LAST_PORT, FIRST_PORT = 65535, 1024


def duration(text: str, option: str) -> float:
    """Seconds of "30m", "1h30m", "90s" or "90"; more than 0, at most ``LONGEST_SECONDS``."""
    if _NUMBER.fullmatch(text):
        seconds = float(text)
    elif _DURATION.fullmatch(text):
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))
    else:
        raise ValueError(f"{option} {text}: is no duration such as 90s, 30m or 1h30m")
    if seconds <= 0:
        raise ValueError(f"{option} {text}: must be longer than nothing")
    if seconds > LONGEST_SECONDS:
        raise ValueError(f"{option} {text}: must not be longer than {LONGEST_SECONDS / _SECONDS['d']:g}d")
    return seconds


def ranks(text: str) -> tuple[tuple[int, ...] | None, bool]:
    """(ranks or None for any, whether only the first process that gets there) of "0,1", "first" or "all"."""
    if text in ("first", "all"):
        return None, text == "first"
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"--rank {text}: is neither first, nor all, nor ranks such as 0,1")
    return tuple(sorted({int(part) for part in parts})), False


def roles(text: str) -> tuple[str, ...]:
    """Roles of "trainer", "rollout" (everything that generates), "engine-core,worker"; empty for any."""
    found: list[str] = []
    for name in (part.strip() for part in text.split(",") if text):
        known = CHOICES.get(name) or tuple(role for role in ROLES if role in (name, name.replace("-", " ")))
        if not known:
            names = dict.fromkeys([*CHOICES, *(role.replace(" ", "-") for role in ROLES)])
            raise ValueError(f"--role {name}: is no role; there are {', '.join(names)}")
        found += known
    return tuple(dict.fromkeys(found))


def ports(text: str) -> tuple[int, int]:
    """Both ends of "5678-5700" or "5678"; (0, 0), any free one, for ""."""
    if not text:
        return 0, 0
    found = _PORTS.fullmatch(text)
    if found is None:
        raise ValueError(f"--port {text}: is neither a port nor a range such as 5678-5700")
    first = int(found[1])
    last = int(found[2] or first)
    if not FIRST_PORT <= first <= last <= LAST_PORT:
        raise ValueError(f"--port {text}: not within {FIRST_PORT}-{LAST_PORT}, the lower end first")
    return first, last


def shown(seconds: float) -> str:
    """As a person would write it: 5400 -> "1h30m"."""
    left, parts = round(seconds), []
    for unit in ("d", "h", "m", "s"):
        count, left = divmod(left, int(_SECONDS[unit]))
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or f"{seconds:g}s"
