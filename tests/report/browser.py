"""A real browser, without a screen: the page after its script has run."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
TIMEOUT_SECONDS = 120


def program() -> str | None:
    """The browser on this machine, if any."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page(HTMLParser):
    """What a person would find on the page: texts by id, the rows of the table, the classes of the tokens."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.texts: dict[str, str] = {}
        self.attributes: dict[str, dict[str, str | None]] = {}
        self.rows: list[dict[str, str]] = []
        self.sort: dict[str, str | None] = {}
        self.strip: list[tuple[str, str]] = []
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if found.get("id"):
            self.attributes[str(found["id"])] = found
            self.texts[str(found["id"])] = ""
        if tag == "tr" and "data-key" in found:
            self.rows.append({"key": str(found["data-key"])})
        if tag == "th" and "data-name" in found:
            self.sort[str(found["data-name"])] = found.get("aria-sort")
        if tag == "span" and "data-t" in found:
            self.strip.append((str(found.get("class")), ""))
        if tag not in ("meta", "input", "wbr", "br", "img"):
            self._open.append((tag, found))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        for tag, found in self._open:
            if found.get("id"):
                self.texts[str(found["id"])] += data
            column = re.match(r"c-(\w+)", found.get("class") or "")
            if tag == "td" and column:
                self.rows[-1][column[1]] = self.rows[-1].get(column[1], "") + data
        if self._open and "data-t" in self._open[-1][1]:
            self.strip[-1] = (self.strip[-1][0], self.strip[-1][1] + data)


def visit(path: Path, view: str, profile: Path) -> Page:
    """Open ``path`` with ``view`` behind the ``#``."""
    url = path.as_uri() + (f"#{view}" if view else "")
    command = [str(program()), *FLAGS, f"--user-data-dir={profile}", "--virtual-time-budget=3000", "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True)
    return Page(done.stdout)
