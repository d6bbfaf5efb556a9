"""One HTML file that needs nothing else: no network, no other file, and no text of a sample can run in it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def page(title: str, name: str, data: Any, shared: Sequence[str] = ()) -> str:
    """The page made of ``name``.html, .css and .js beside this file, with ``data`` as JSON for the script to read.

    ``shared``: names of styles and scripts that come before them. The policy allows exactly this style and this script,
    by their hashes, and nothing to be fetched.
    """
    body = _part(f"{name}.html")
    style, script = ("\n".join(_part(f"{part}.{kind}") for part in (*shared, name)) for kind in ("css", "js"))
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    return PAGE.format(
        policy=policy, title=html.escape(title), style=style, body=body, data=embedded(data), script=script
    )


def embedded(data: Any) -> str:
    """JSON for a script element: no ``<`` that could end it or open a comment, nothing but ASCII. No nan or inf."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _part(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8").strip()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
