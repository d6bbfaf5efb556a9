"""How every message about a setting reads: ``train.lr = 0 (run.toml): must be > 0``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

UNSET = object()


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found: ``path`` is the setting to change, ``text`` the rule, ``reads`` all settings it looked at."""

    path: str
    text: str
    reads: tuple[str, ...] = ()


def line(path: str, value: Any, origin: str, text: str) -> str:
    """One line of a problem or a warning."""
    name = path if len(path) <= 120 else path[:117] + "..."
    what = name if value is UNSET else f"{name} = {short(value)}"
    return f"{what} ({origin}): {masked(text)}"


def masked(text: str) -> str:
    """``text`` without the credentials of URLs."""
    return re.sub(r'://[^\s"]*@', "://...@", text)


def short(value: Any, limit: int = 80) -> str:
    """``value`` as one would type it in TOML, without credentials, cut to ``limit`` characters."""
    text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else masked(toml_value(value))
    return text if len(text) <= limit else text[: limit - 3] + "..."


def toml_value(value: Any) -> str:
    """``value`` as TOML (None as the string "none", which ``load`` reads back as None)."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _toml_float(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_key(str(k))} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    return str(value)  # int, and TOML's dates and times, print as TOML writes them


def toml_key(key: str) -> str:
    """``key`` bare where TOML allows it, quoted otherwise."""
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else json.dumps(key, ensure_ascii=False)


def _toml_float(value: float) -> str:
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    text = repr(value)  # shortest text that reads back to the same float
    mantissa, e, exponent = text.partition("e")
    return text if "." in mantissa or not e else f"{mantissa}.0e{exponent}"
